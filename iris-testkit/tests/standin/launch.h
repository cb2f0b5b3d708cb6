// Launches that are only logged, with the parameters by name.
#ifndef STANDIN_LAUNCH_H
#define STANDIN_LAUNCH_H

#include "work.h"

namespace standin {

struct Module {
    int device;
    Image image;
};
struct Function {
    Module* module;
    const Kernel* kernel;
    /// Number of bytes of shared memory that a workgroup may use.
#ifdef STANDIN_HIP
    u32 shared = 64 << 10;
#else
    u32 shared = 48 << 10;
#endif
};

inline const std::string& name_of(const Function* function) { return function->kernel->name; }

inline u64 read(const char* at, u32 bytes) {
    u64 value = 0;
    std::memcpy(&value, at, bytes);
    return value;
}

/// Writes one field of a kernel's parameter to the log as `name=value`, unless the value is zero.
inline void write_field(std::ostringstream& line, const std::string& name, const Field& field, const char* at) {
    if (field.kind == "map") {
        const std::string map = map_shown(at, shown);
        if (!map.empty()) line << " " << name << "=" << map;
        return;
    }
    const u64 value = read(at, field.bytes);
    if (value == 0) return;
    line << " " << name << "=";
    if (field.kind == "float") {
        float real;
        std::memcpy(&real, at, 4);
        line << real;
    } else if (field.kind == "i32") {
        line << static_cast<std::int32_t>(value);
    } else {
        const std::string address = field.bytes == 8 ? named(value) : "";
        if (address.empty()) line << value;
        else line << address;
    }
}

/// Loads a kernel image for the current device.
inline Error load(Module** module, const char* image) {
    std::lock_guard guard(lock);
    if (const Error code = check_apart()) return code;
    *module = new Module{current, {}};
    return read_image(image, (*module)->image) ? SUCCESS : INVALID_IMAGE;
}
inline Error find(Function** function, Module* module, const char* name) {
    const auto found = module->image.kernels.find(name);
    if (found == module->image.kernels.end()) return NOT_FOUND;
    *function = new Function{module, &found->second};
    return SUCCESS;
}

inline Error launch(const char* function, Function* kernel, u32 groups, u32 threads, u32 shared, Stream* stream,
                    void** parameters, const std::string& attributes) {
    std::lock_guard guard(lock);
    const bool odd = groups == 0 || threads == 0 || threads > 1024 || shared > kernel->shared;
    if (odd || kernel->module->device != current) return INVALID_VALUE;
    std::ostringstream line;
    line << kernel->kernel->name << " " << kernel->module->image.title() << " " << groups << "x" << threads << " shared "
         << shared << attributes << " |";
    for (std::size_t at = 0; at < kernel->kernel->parameters.size(); ++at) {
        const Parameter& parameter = kernel->kernel->parameters[at];
        const char* from = static_cast<const char*>(parameters[at]);
        for (const Field& field : parameter.fields) {
            for (u32 index = 0; index < field.count; ++index) {
                std::string name = parameter.prefix + field.name;
                if (field.count > 1) name += "[" + std::to_string(index) + "]";
                write_field(line, name, field, from + field.offset + u64{index} * field.bytes);
            }
        }
    }
    return enqueue(stream, function, line.str());
}

/// Number of workgroups that fit on a multiprocessor if each thread takes 64 registers.
inline u32 resident(u64 threads, u64 shared) {
    const u64 by_threads = 65536 / 64 / (threads == 0 ? 1 : threads), by_shared = (228 << 10) / (shared + 1024);
    return static_cast<u32>(std::min<u64>({by_threads, by_shared, 32}));
}

} // namespace standin

#endif
