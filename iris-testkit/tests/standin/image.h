// Image that the stand-in compiler makes: a text with the source's name, the options, and the
// parameter layout of each kernel. The stand-in drivers read it to log parameters by name.
#ifndef STANDIN_IMAGE_H
#define STANDIN_IMAGE_H

#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace standin {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

/// Start of an image: the magic number of ELF files, which both vendors' machine code has.
inline const std::string MAGIC = "\x7f" "ELF stand-in\n";

/// Field of a structure: a number, an array of `count` numbers, or a tensor map (`kind` says
/// which).
struct Field {
    std::string name, kind;
    u32 offset, bytes, count;
};
struct Parameter {
    std::string prefix;
    std::vector<Field> fields;
};
struct Kernel {
    std::string name;
    std::vector<Parameter> parameters;
};
struct Image {
    std::string source, arch, options, hash;
    std::map<std::string, Kernel> kernels;
    /// Title of the image in logs: the source's name and the compile options.
    std::string title() const { return source + "{" + options + "}"; }
    /// Value of the macro `name` with which the image was compiled; `otherwise` if it was not set.
    u32 option(const std::string& name, u32 otherwise) const {
        const auto at = (" " + options).find(" " + name + "=");
        return at == std::string::npos ? otherwise : static_cast<u32>(std::stoul(options.substr(at + name.size() + 1)));
    }
};

/// Parses `text` into `image`; returns false if `text` is not an image.
inline bool read_image(const char* text, Image& image) {
    if (std::strncmp(text, MAGIC.c_str(), MAGIC.size()) != 0) return false;
    std::istringstream lines(text + MAGIC.size());
    std::map<std::string, std::vector<Field>> types;
    std::string line, word, type;
    while (std::getline(lines, line)) {
        std::istringstream words(line);
        words >> word;
        if (word == "source") words >> image.source;
        else if (word == "arch") words >> image.arch;
        else if (word == "hash") words >> image.hash;
        else if (word == "options") std::getline(words >> std::ws, image.options);
        else if (word == "type") words >> type;
        else if (word == "field") {
            Field field;
            words >> field.name >> field.kind >> field.offset >> field.bytes >> field.count;
            // A field of a type that is no structure has no name.
            if (field.name == "-") field.name.clear();
            types[type].push_back(field);
        } else if (word == "kernel") {
            Kernel kernel;
            words >> kernel.name;
            std::string name;
            while (words >> type >> name) {
                const bool single = types[type].size() == 1 && types[type][0].name.empty();
                // Fields of OpArgs are logged without a prefix, because OpArgs is the parameter of
                // every operator's kernels.
                const std::string prefix = type == "OpArgs" ? "" : single ? name : name + ".";
                kernel.parameters.push_back({prefix, types[type]});
            }
            image.kernels[kernel.name] = kernel;
        }
    }
    return !image.source.empty();
}

/// Tensor map as the stand-in driver encodes it: 128 bytes, as for a real one, in a layout that can
/// be read back.
struct Map {
    u64 magic, address, sizes[2], stride;
    u32 box[2], steps[2];
    std::int32_t kind, interleave, swizzle, promotion, fill, rest;
    u64 unused[6];
};
static_assert(sizeof(Map) == 128, "as the driver's");
constexpr u64 MAP = 0x70616d2d6e692d64;

/// Text of the tensor map at address `at`, as the log shows it; empty if there is no tensor map.
template <class Shown> std::string map_shown(const char* at, Shown shown) {
    Map map;
    std::memcpy(&map, at, sizeof map);
    if (map.magic != MAP) return std::string(128, '\0') == std::string(at, 128) ? "" : "NO MAP";
    std::ostringstream text;
    text << "map(" << shown(map.address) << "," << map.sizes[0] << "x" << map.sizes[1] << "/" << map.stride << ",box"
         << map.box[0] << "x" << map.box[1] << "/" << map.steps[0] << "x" << map.steps[1] << ",type" << map.kind << "/"
         << map.interleave << "/" << map.swizzle << "/" << map.promotion << "/" << map.fill << ")";
    return text.str();
}

} // namespace standin

#endif
