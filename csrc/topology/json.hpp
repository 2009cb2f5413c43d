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

struct Value {
  // A number without fraction and exponent that fits is an int64_t, any other a double.
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> data;

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
