// Stand-in for NVRTC and hiprtc that compiles nothing. Its image records the source and options of
// the request, and the parameter layout of each kernel, which is parsed from the source. The parser
// knows only what kernels use: structures are lists of numbers and of other structures.
//
// This file is long because it parses a language.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <set>
#include <stdexcept>

#include "rtc.h"

namespace {

using standin::Field;
using standin::u32;
using standin::u64;
using standin::Texts;
using Words = std::vector<std::string>;

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

/// Appends `text` to `all`, preceded by the headers that it includes, each header once.
void gather(const std::string& text, const Texts& headers, std::set<std::string>& seen, std::string& all) {
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line)) {
        const auto at = line.find("#include \"");
        if (at != std::string::npos) {
            const auto begin = at + 10, end = line.find('"', begin);
            const auto found = headers.find(line.substr(begin, end - begin));
            if (found != headers.end() && seen.insert(found->first).second) gather(found->second, headers, seen, all);
        }
    }
    all += text + "\n";
}

/// Tokens of a source text (names, numbers, single signs), and the values of macros, defined in the
/// text or on the command line.
struct Text {
    Words words;
    std::map<std::string, std::string> values;

    Text(const std::string& all, const std::map<std::string, std::string>& given) {
        std::size_t at = 0;
        const auto line_end = [&] {
            auto end = all.find('\n', at);
            while (end != std::string::npos && all[end - 1] == '\\') end = all.find('\n', end + 1);
            return end == std::string::npos ? all.size() : end;
        };
        while (at < all.size()) {
            const char c = all[at];
            if (all.compare(at, 2, "//") == 0) {
                at = line_end();
            } else if (all.compare(at, 2, "/*") == 0) {
                at = all.find("*/", at) + 2;
            } else if (c == '#') {
                const auto end = line_end();
                std::istringstream macro(all.substr(at, end - at));
                std::string define, name, value;
                if (macro >> define >> name >> value && define == "#define") values.emplace(name, value);
                at = end;
            } else if (c == '"' || c == '\'') {
                for (++at; all[at] != c; ++at) at += all[at] == '\\';
                ++at;
                words.push_back("\"");
            } else if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') {
                auto end = at;
                while (end < all.size() && (std::isalnum(static_cast<unsigned char>(all[end])) || all[end] == '_')) ++end;
                words.push_back(all.substr(at, end - at));
                at = end;
            } else {
                if (!std::isspace(static_cast<unsigned char>(c))) words.push_back(std::string(1, c));
                ++at;
            }
        }
        for (std::size_t word = 0; word + 3 < words.size(); ++word) {
            if (words[word] == "constexpr" && words[word + 3] == "=") values.emplace(words[word + 2], words[word + 4]);
        }
        for (const auto& [name, value] : given) values[name] = value;
    }

    u32 number(const std::string& word) const {
        if (std::isdigit(static_cast<unsigned char>(word[0]))) return static_cast<u32>(std::stoul(word, nullptr, 0));
        const auto found = values.find(word);
        if (found == values.end()) fail("the stand-in does not know how much " + word + " is");
        return number(found->second);
    }
    /// Index of the token after the one that closes the bracket at index `at`.
    std::size_t behind(std::size_t at) const {
        const std::string open = words[at], close = open == "(" ? ")" : open == "{" ? "}" : "]";
        for (u32 depth = 0; at < words.size(); ++at) {
            if (words[at] == open) ++depth;
            if (words[at] == close && --depth == 0) return at + 1;
        }
        fail("the stand-in finds no " + close);
    }
};

struct Type {
    u32 bytes, align;
    std::vector<Field> fields;
};

/// Types of the source by name; a structure is parsed when it is first looked up.
struct Types {
    const Text& text;
    std::map<std::string, Type> known;

    explicit Types(const Text& text) : text(text) {
        const auto plain = [&](const char* name, u32 bytes) { known[name] = {bytes, bytes, {{"", name, 0, bytes, 1}}}; };
        for (const char* name : {"u8", "bool"}) plain(name, 1);
        plain("u16", 2);
        for (const char* name : {"u32", "i32", "float", "int", "unsigned"}) plain(name, 4);
        for (const char* name : {"u64", "i64"}) plain(name, 8);
        known["TensorMap"] = {128, 64, {{"", "map", 0, 128, 1}}};
    }

    const Type& of(const std::string& name) {
        const auto found = known.find(name);
        if (found != known.end()) return found->second;
        const Words& words = text.words;
        for (std::size_t at = 0; at + 2 < words.size(); ++at) {
            if (words[at] == "struct" && words[at + 1] == name && words[at + 2] == "{") {
                return known[name] = structure(at + 3);
            }
        }
        fail("the stand-in finds no structure " + name);
    }

    /// Parses a structure's fields; `at` is the index of the token after its opening brace.
    Type structure(std::size_t at) {
        Type type{0, 1, {}};
        const Words& words = text.words;
        while (words[at] != "}") {
            Words statement;
            bool is_field = true;
            while (words[at] != ";" && words[at] != "{") {
                is_field = is_field && words[at] != "(" && words[at] != "=";
                statement.push_back(words[at++]);
            }
            if (words[at] == "{") {
                at = text.behind(at);
                if (words[at] == ";") ++at;
                continue;
            }
            ++at;
            static const std::set<std::string> OTHERS = {"friend", "using", "static", "template", "enum", "struct"};
            if (is_field && OTHERS.count(statement[0]) == 0) add(type, statement);
        }
        type.bytes = (type.bytes + type.align - 1) / type.align * type.align;
        return type;
    }

    /// Adds the fields of one declaration, such as `u32 rows, cols[N]`, to `to`.
    void add(Type& to, const Words& statement) {
        const Type type = of(statement[0]);
        for (std::size_t at = 1; at < statement.size(); ++at) {
            const std::string name = statement[at++];
            u32 count = 1;
            const bool is_array = at < statement.size() && statement[at] == "[";
            if (is_array) {
                count = text.number(statement[at + 1]);
                at += 3;
            }
            to.align = std::max(to.align, type.align);
            to.bytes = (to.bytes + type.align - 1) / type.align * type.align;
            const bool plain = type.fields.size() == 1 && type.fields[0].name.empty();
            for (u32 index = 0; index < (plain ? 1 : count); ++index) {
                const std::string own = is_array && !plain ? name + "[" + std::to_string(index) + "]" : name;
                for (Field field : type.fields) {
                    field.name = plain ? own : own + "." + field.name;
                    field.offset += to.bytes + index * type.bytes;
                    if (plain) field.count = count;
                    to.fields.push_back(field);
                }
            }
            to.bytes += count * type.bytes;
        }
    }
};

/// Appends to the image the kernels of a source and the layouts of their parameter types.
void write_kernels(const Text& text, std::ostringstream& image) {
    Types types(text);
    std::ostringstream kernels;
    std::set<std::string> used;
    const Words& words = text.words;
    for (std::size_t at = 0; at + 2 < words.size(); ++at) {
        const bool is_kernel = words[at] == "IRIS_KERNEL" || words[at] == "IRIS_GEMM_KERNEL";
        if (!is_kernel || words[at + 2] != "(") continue;
        kernels << "kernel " << words[at + 1];
        const std::size_t end = text.behind(at + 2) - 1;
        for (std::size_t word = at + 3; word < end; ++word) {
            // A parameter's type and name are the two tokens before a comma or before the end.
            if (words[word + 1] != "," && word + 1 != end) continue;
            kernels << " " << words[word - 1] << " " << words[word];
            used.insert(words[word - 1]);
        }
        kernels << "\n";
    }
    for (const std::string& name : used) {
        const Type& type = types.of(name);
        image << "type " << name << " " << type.bytes << "\n";
        for (const Field& field : type.fields) {
            image << "field " << (field.name.empty() ? "-" : field.name) << " " << field.kind << " " << field.offset << " "
                  << field.bytes << " " << field.count << "\n";
        }
    }
    image << kernels.str();
}

u64 hash(u64 before, const std::string& text) {
    for (unsigned char c : text + '\0') before = (before ^ c) * 1099511628211u;
    return before;
}

} // namespace

int standin::compile(Program* program, int count, const char** options) {
    std::string arch, shown;
    std::map<std::string, std::string> given;
    u64 sum = 1469598103934665603u;
    for (int at = 0; at < count; ++at) {
        const std::string option = options[at];
        sum = hash(sum, option);
        const auto value = option.find('=');
        if (option.rfind("-D", 0) == 0) {
            given[option.substr(2, value - 2)] = option.substr(value + 1);
            shown += (shown.empty() ? "" : " ") + option.substr(2);
        } else if (option.find("arch=") != std::string::npos) {
            arch = option.substr(value + 1);
        }
    }
    std::string all;
    std::set<std::string> seen;
    gather(program->text, program->headers, seen, all);
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash(sum, all)));
    std::ostringstream image;
    image << standin::MAGIC << "source " << program->name << "\narch " << arch << "\noptions " << shown << "\nhash "
          << digits << "\n";
    try {
        write_kernels(Text(all, given), image);
    } catch (const std::exception& error) {
        program->log = error.what();
        return 6;
    }
    program->image = image.str();
    return 0;
}
