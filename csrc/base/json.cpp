#include "base/json.hpp"

#include <algorithm>
#include <charconv>

#include "base/error.hpp"

namespace dpt::json {
namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Value parse_document() {
    Value value = parse_value(0);
    skip_space();
    if (position_ != text_.size()) fail("text after the end of the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    const std::string_view before = text_.substr(0, position_);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const auto column = position_ - (before.rfind('\n') + 1) + 1;
    throw Error(
        DPT_ERR_INVALID,
        "JSON, line " + std::to_string(line) + ", column " + std::to_string(column) + ": " + what);
  }

  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }

  bool take(std::string_view token) {
    if (text_.substr(position_, token.size()) != token) return false;
    position_ += token.size();
    return true;
  }

  void skip_space() {
    while (position_ < text_.size() &&
           std::string_view(" \t\r\n").find(peek()) != std::string_view::npos)
      ++position_;
  }

  Value parse_value(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    skip_space();
    if (peek() == '{') return {parse_object(depth)};
    if (peek() == '[') return {parse_array(depth)};
    if (peek() == '"') return {parse_string()};
    if (take("true")) return {true};
    if (take("false")) return {false};
    if (take("null")) return {nullptr};
    return parse_number();
  }

  Object parse_object(int depth) {
    Object object;
    take("{");
    skip_space();
    if (take("}")) return object;
    do {
      skip_space();
      if (peek() != '"') fail("expected a key in quotes");
      std::string key = parse_string();
      for (const auto& [known, value] : object) {
        if (known == key) fail("key \"" + key + "\" appears twice");
      }
      skip_space();
      if (!take(":")) fail("expected ':'");
      object.push_back({std::move(key), parse_value(depth + 1)});
      skip_space();
    } while (take(","));
    if (!take("}")) fail("expected ',' or '}'");
    return object;
  }

  Array parse_array(int depth) {
    Array array;
    take("[");
    skip_space();
    if (take("]")) return array;
    do {
      array.push_back(parse_value(depth + 1));
      skip_space();
    } while (take(","));
    if (!take("]")) fail("expected ',' or ']'");
    return array;
  }

  std::string parse_string() {
    std::string string;
    take("\"");
    while (!take("\"")) {
      if (position_ == text_.size()) fail("a string without its closing quote");
      if (static_cast<unsigned char>(peek()) < 0x20) fail("a control character in a string");
      if (take("\\")) {
        parse_escape(&string);
      } else {
        string += text_[position_++];
      }
    }
    return string;
  }

  void parse_escape(std::string* string) {
    constexpr std::string_view kLetters = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const char letter = peek();
    if (take("u")) {
      append_utf8(parse_code_point(), string);
      return;
    }
    const size_t index = kLetters.find(letter);
    if (position_ == text_.size() || index == std::string_view::npos) fail("an unknown escape");
    *string += kMeanings[index];
    ++position_;
  }

  uint32_t parse_code_point() {
    const uint32_t unit = parse_hex();
    if (unit < 0xd800 || unit > 0xdfff) return unit;
    if (unit > 0xdbff || !take("\\u")) fail("half a surrogate pair");
    const uint32_t low = parse_hex();
    if (low < 0xdc00 || low > 0xdfff) fail("half a surrogate pair");
    return 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
  }

  uint32_t parse_hex() {
    const std::string_view digits = text_.substr(position_, 4);
    uint32_t unit = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), unit, 16);
    if (digits.size() != 4 || end != digits.end()) fail("expected four hexadecimal digits");
    position_ += 4;
    return unit;
  }

  static void append_utf8(uint32_t code, std::string* string) {
    if (code < 0x80) {
      *string += static_cast<char>(code);
      return;
    }
    const int continuations = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    constexpr uint8_t kLead[] = {0, 0xc0, 0xe0, 0xf0};
    *string += static_cast<char>(kLead[continuations] | code >> 6 * continuations);
    for (int i = continuations - 1; i >= 0; --i) {
      *string += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
    }
  }

  bool take_digits() {
    const size_t start = position_;
    while (peek() >= '0' && peek() <= '9') ++position_;
    return position_ != start;
  }

  Value parse_number() {
    const size_t start = position_;
    take("-");
    if (!take("0") && !take_digits()) fail("expected a value");
    bool integral = true;
    if (take(".")) {
      integral = false;
      if (!take_digits()) fail("expected a digit after '.'");
    }
    if (take("e") || take("E")) {
      integral = false;
      if (!take("+")) take("-");
      if (!take_digits()) fail("expected a digit in the exponent");
    }
    const std::string digits(text_.substr(start, position_ - start));
    int64_t integer = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), integer);
    if (integral && result.ec == std::errc()) return {integer};
    return {Number{digits}};
  }

  std::string_view text_;
  size_t position_ = 0;
};

void append_string(const std::string& string, std::string* out) {
  constexpr char kHex[] = "0123456789abcdef";
  *out += '"';
  for (const char c : string) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') *out += '\\';
    if (byte < 0x20) {
      *out += std::string("\\u00") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      *out += c;
    }
  }
  *out += '"';
}

bool is_container(const Value& value) {
  return value.get_if<Array>() != nullptr || value.get_if<Object>() != nullptr;
}

void append_value(const Value& value, int indent, std::string* out);

// `append_item(i)` writes the i-th of `size` items.
template <typename AppendItem>
void append_items(
    size_t size, bool one_line, int indent, std::string* out, AppendItem append_item) {
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) *out += one_line ? ", " : ",";
    if (!one_line) *out += "\n" + std::string(indent + 2, ' ');
    append_item(i);
  }
  if (!one_line) *out += "\n" + std::string(indent, ' ');
}

void append_value(const Value& value, int indent, std::string* out) {
  if (const auto* array = value.get_if<Array>()) {
    const bool one_line = std::none_of(array->begin(), array->end(), is_container);
    *out += "[";
    append_items(array->size(), one_line, indent, out, [&](size_t i) {
      append_value((*array)[i], indent + 2, out);
    });
    *out += "]";
  } else if (const auto* object = value.get_if<Object>()) {
    const bool one_line = std::none_of(
        object->begin(), object->end(), [](const auto& item) { return is_container(item.value); });
    *out += "{";
    append_items(object->size(), one_line, indent, out, [&](size_t i) {
      append_string((*object)[i].key, out);
      *out += ": ";
      append_value((*object)[i].value, indent + 2, out);
    });
    *out += "}";
  } else if (const auto* string = value.get_if<std::string>()) {
    append_string(*string, out);
  } else if (const auto* integer = value.get_if<int64_t>()) {
    *out += std::to_string(*integer);
  } else if (const auto* number = value.get_if<Number>()) {
    *out += number->digits;
  } else if (const auto* boolean = value.get_if<bool>()) {
    *out += *boolean ? "true" : "false";
  } else {
    *out += "null";
  }
}

}  // namespace

const char* Value::kind() const {
  constexpr const char* kKinds[] = {
      "null", "a boolean", "an integer", "a number", "a string", "an array", "an object"};
  return kKinds[data.index()];
}

Value parse(std::string_view text) { return Parser(text).parse_document(); }

std::string dump(const Value& value) {
  std::string text;
  append_value(value, 0, &text);
  return text + "\n";
}

}  // namespace dpt::json
