// Functions that NVRTC and hiprtc have alike; the macro STANDIN_HIP chooses hiprtc's names for them.
#ifndef STANDIN_RTC_H
#define STANDIN_RTC_H

#include "image.h"

namespace standin {

using Texts = std::map<std::string, std::string>;

struct Program {
    std::string text, name, log, image;
    Texts headers;
};

/// Compiles a program; returns 0, or 6 for an error, which the program's log has.
int compile(Program* program, int count, const char** options);

} // namespace standin

using standin::Program, standin::u64;

#ifdef STANDIN_HIP
#define RTC(name) hiprtc##name
#define CODE(name) hiprtcGetCode##name
#else
#define RTC(name) nvrtc##name
#define CODE(name) nvrtcGetCUBIN##name
#endif

extern "C" {
int RTC(Version)(int* major, int* minor) {
    *major = 13, *minor = 0;
    return 0;
}
const char* RTC(GetErrorString)(int code) { return code == 0 ? "SUCCESS" : "ERROR_COMPILATION"; }
int RTC(CreateProgram)(Program** program, const char* text, const char* name, int count, const char** texts,
                        const char** names) {
    *program = new Program{text, name, "", "", {}};
    for (int at = 0; at < count; ++at) (*program)->headers[names[at]] = texts[at];
    return 0;
}
int RTC(DestroyProgram)(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
int RTC(CompileProgram)(Program* program, int count, const char** options) { return compile(program, count, options); }
int RTC(GetProgramLogSize)(Program* program, u64* bytes) {
    *bytes = program->log.size() + 1;
    return 0;
}
int RTC(GetProgramLog)(Program* program, char* to) {
    std::memcpy(to, program->log.c_str(), program->log.size() + 1);
    return 0;
}
int CODE(Size)(Program* program, u64* bytes) {
    *bytes = program->image.size() + 1;
    return 0;
}
int CODE()(Program* program, char* to) {
    std::memcpy(to, program->image.c_str(), program->image.size() + 1);
    return 0;
}
#ifndef STANDIN_HIP
int nvrtcGetPTXSize(Program*, u64* bytes) {
    *bytes = 1;
    return 0;
}
int nvrtcGetPTX(Program*, char* to) {
    *to = 0;
    return 0;
}
#endif
}

#endif
