// Kernels of a fake runtime that computes: device source, compiled as host code by g++ with the hooks
// of iris-kernels/tests/host. Passing tests on the fake say nothing about a real device.
#ifndef FAKE_COMPUTE_H
#define FAKE_COMPUTE_H

#include <dlfcn.h>
#include <sys/file.h>

#include <chrono>
#include <filesystem>
#include <regex>

#include "../standin/rtc.h"
#include "../standin/work.h"

namespace standin {

/// Returns a new function that launches a kernel with a copy of the arguments at `args`.
using Bind = Work* (*)(void** args, u32 groups);
struct Module {
    void* library;
    int device;
};
struct Function {
    Module* module;
    std::string name;
    Bind bind;
};

inline std::string content(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
}

inline const std::string& name_of(const Function* function) { return function->name; }

/// Prefix of the name under which a compiled source exports the `Bind` of a kernel.
constexpr const char* BIND = "iris_host_bind_";

inline Error load(Module** module, const char* text) {
    const auto* image = reinterpret_cast<const unsigned char*>(text);
    // Size of the ELF file, computed from its header: g++ writes the section table last.
    u64 sections;
    std::memcpy(&sections, image + 40, 8);
    const u64 bytes = sections + u64{image[58]} * (image[60] + 256u * image[61]);
    const int file = memfd_create("module", 0);
    if (write(file, image, bytes) != static_cast<ssize_t>(bytes)) return INVALID_IMAGE;
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return outcome(INVALID_IMAGE, "dlopen", dlerror());
    *module = new Module{library, current};
    return SUCCESS;
}
inline Error find(Function** function, Module* module, const char* name) {
    const auto bind = reinterpret_cast<Bind>(dlsym(module->library, (BIND + std::string(name)).c_str()));
    if (bind == nullptr) return NOT_FOUND;
    *function = new Function{module, name, bind};
    return SUCCESS;
}

inline Error launch(const char* call, Function* function, u32 groups, u32 threads, u32 shared, Stream* stream,
                    void** parameters, const std::string&) {
    std::lock_guard guard(lock);
    const bool odd = threads == 0 || threads > 1024 || shared > 64 << 10;
    if (odd || function->module->device != current) return INVALID_VALUE;
    // The caller may reuse the parameters after the launch returns, so they are copied here.
    const std::shared_ptr<Work> work(function->bind(parameters, groups));
    const std::chrono::milliseconds late(std::stoi(setting("FAKE_HIP_DELAY", "0")));
    return enqueue(stream, call, function->name, [=] {
        std::this_thread::sleep_for(late);
        (*work)();
    });
}

/// Compiles a program by g++, with the options `defines`; returns whether it succeeded.
inline bool compiled(Program& program, const std::string& defines) {
    char folder[] = "/tmp/fake-hiprtc-XXXXXX";
    if (mkdtemp(folder) == nullptr) return false;
    const std::string at = folder, hooks = setting("FAKE_HIP_HOOKS", ".");
    for (const auto& [name, text] : program.headers) {
        std::filesystem::create_directories(std::filesystem::path(at + "/" + name).parent_path());
        std::ofstream(at + "/" + name) << text;
    }
    std::ofstream source(at + "/source.cpp");
    source << program.text << "\n#include \"" << hooks << "/launch.h\"\n";
    static const std::regex kernel("IRIS_KERNEL\\s+(\\w+)\\(");
    for (std::sregex_iterator it(program.text.begin(), program.text.end(), kernel), end; it != end; ++it) {
        source << "extern \"C\" std::function<void()>* " << BIND << (*it)[1] << "(void** args, u32 groups) {\n"
               << "    return new std::function<void()>(bound(" << (*it)[1] << ", args, groups));\n}\n";
    }
    source.close();
    // A workgroup has two threads, and each is a host thread.
    const std::string command = "g++ -std=c++20 -O1 -w -fPIC -fexceptions -pthread -shared -I" + at + defines +
                                " -DIRIS_THREADS=2 -o " + at + "/code.so " + at + "/source.cpp 2> " + at + "/log";
    const int status = std::system(command.c_str());
    program.log = content(at + "/log"), program.image = content(at + "/code.so");
    std::filesystem::remove_all(at);
    return status == 0;
}
inline int compile(Program* program, int count, const char** options) {
    std::string defines;
    for (int i = 0; i < count; ++i) {
        if (std::strncmp(options[i], "-D", 2) == 0) defines += std::string(" ") + options[i];
    }
    const std::string shared = setting("FAKE_HIP_CODE", "");
    if (shared.empty()) return compiled(*program, defines) ? 0 : 6;
    // Ranks need the same programs at the same time: one compiles, and the others wait for its file.
    std::string all = program->text + defines;
    for (const auto& [name, text] : program->headers) all += name + text;
    const auto file = shared + "/" + std::to_string(std::hash<std::string>{}(all));
    // The lock is a file of its own, because the renaming below replaces the file.
    const int held = open((file + ".lock").c_str(), O_CREAT | O_RDONLY | O_CLOEXEC, 0600);
    flock(held, LOCK_EX);
    program->image = content(file);
    if (program->image.empty() && compiled(*program, defines)) {
        // The file is renamed when it is complete, because this process may be killed at any time.
        std::ofstream(file + ".new", std::ios::binary) << program->image;
        std::rename((file + ".new").c_str(), file.c_str());
    }
    close(held);
    return program->image.empty() ? 6 : 0;
}
} // namespace standin

#endif
