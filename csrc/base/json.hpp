// A small, strict JSON reader and writer. It stays our own: a header-only library of 25,000 lines
// would have to come with each source package, and takes duplicate keys without a word.
//
// Strict: RFC 8259 without duplicate keys, at most 64 levels deep.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace dpt::json {

struct Value;
struct Member;  // a key and its value; a pair of an incomplete type is one only GCC takes
using Array = std::vector<Value>;
using Object = std::vector<Member>;  // in the order of the text

// A number that is no int64_t, as it was written.
struct Number {
  std::string digits;
};

struct Value {
  std::variant<std::nullptr_t, bool, int64_t, Number, std::string, Array, Object> data;

  template <typename T>
  const T* get_if() const;
  // "an object", "a string", ...: for messages.
  const char* kind() const;
};

struct Member {
  std::string key;
  Value value;
};

template <typename T>
const T* Value::get_if() const {
  return std::get_if<T>(&data);
}

// Throws Error(DPT_ERR_INVALID) with line and column.
Value parse(std::string_view text);

// Indented by two spaces; an array or object without arrays and objects inside is one line.
std::string dump(const Value& value);

}  // namespace dpt::json
