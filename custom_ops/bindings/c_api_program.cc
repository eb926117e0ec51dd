// C functions of recorded programs, for ctypes. Nothing is thrown across them.
#include <memory>

#include "c_api.h"
#include "program.h"

namespace {

constexpr fdsd::Error kOutOfMemory = "memory: expected room for the program, got none";

}  // namespace

FDSD_EXPORT fdsd::Error fdsd_program_create(const fdsd::ProgramCreateParams* p) {
  return fdsd::WithinMemory(kOutOfMemory, [&]() -> fdsd::Error {
    auto program = std::make_unique<fdsd::Program>();
    if (fdsd::Error error = program->Build(*p)) return error;
    *p->program = program.release();
    return nullptr;
  });
}

FDSD_EXPORT void fdsd_program_destroy(fdsd::Program* program) { delete program; }

FDSD_EXPORT fdsd::Error fdsd_program_run(const fdsd::ProgramRunParams* p) {
  return p->program->Run(p->symbols, p->num_symbols, p->nanoseconds);
}
