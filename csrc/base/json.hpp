// A small, strict JSON reader and writer, so that the wheel needs no library for it.
//
// Strict: RFC 8259 without duplicate keys, at most 64 levels deep.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace dpt::json {

struct Value;
using Array = std::vector<Value>;
using Object = std::vector<std::pair<std::string, Value>>;  // in the order of the text

// A number that is no int64_t, as it was written.
struct Number {
  std::string digits;
};

struct Value {
  std::variant<std::nullptr_t, bool, int64_t, Number, std::string, Array, Object> data;

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&data);
  }
  // "an object", "a string", ...: for messages.
  const char* kind() const;
};

// Throws Error(DPT_ERR_INVALID) with line and column.
Value parse(std::string_view text);

// Indented by two spaces; an array or object without arrays and objects inside is one line.
std::string dump(const Value& value);

}  // namespace dpt::json
