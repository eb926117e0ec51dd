// Where every field of every struct of include/fdsd/ lies, and its type, as the compiler knows it. The build writes the
// fields' names into declarations.inc, so no other file spells a struct again.
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "c_api.h"
#include "declarations.inc"

namespace {

template <typename T>
std::string TypeName() {
  if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_pointer_t<T>;
    return (std::is_const_v<Pointee> ? "const " : "") + TypeName<std::remove_const_t<Pointee>>() + "*";
  } else if constexpr (std::is_same_v<T, char>) {
    return "char";
  } else if constexpr (std::is_enum_v<T>) {
    return TypeName<std::underlying_type_t<T>>();
  } else if constexpr (std::is_integral_v<T>) {
    return (std::is_signed_v<T> ? "int" : "uint") + std::to_string(8 * sizeof(T));
  } else if constexpr (std::is_floating_point_v<T>) {
    return "float" + std::to_string(8 * sizeof(T));
  } else {
    return std::is_void_v<T> ? "void" : "struct";
  }
}

template <typename T>
std::string Line(const char* path, size_t offset) {
  return std::string(path) + " " + std::to_string(offset) + " " + TypeName<T>() + "\n";
}

}  // namespace

// One line for every field, members of members by their path: "path offset type"; the first is " size struct". nullptr
// where no struct has the name.
FDSD_EXPORT const char* fdsd_struct_layout(const char* name) {
#define FDSD_STRUCT(Name)              \
  if (std::strcmp(name, #Name) == 0) { \
  static const std::string text = [] {       \
      using Struct = fdsd::Name;               \
      std::string lines = Line<Struct>("", sizeof(Struct));
#define FDSD_FIELD(path) lines += Line<decltype(std::declval<Struct&>().path)>(#path, offsetof(Struct, path));
#define FDSD_END       \
  return lines;        \
  }                    \
  ();                  \
  return text.c_str(); \
  }
#include "declarations.inc"
#undef FDSD_STRUCT
#undef FDSD_FIELD
#undef FDSD_END
  return nullptr;
}
