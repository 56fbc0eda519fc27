#pragma once
// JSON that may be hostile: bounded depth, no duplicate names, valid UTF-8, no NaN. Typed access, whose errors name
// file and field.
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace tierflow {

using Json = nlohmann::json;

// Throws Exception (kind input) naming `where`.
Json parse_json(std::string_view text, const std::string& where, int max_depth = 32);

// While it lives: which fields of objects this thread has asked for.
class FieldsAsked {
 public:
  FieldsAsked();
  ~FieldsAsked();
  FieldsAsked(const FieldsAsked&) = delete;
  FieldsAsked& operator=(const FieldsAsked&) = delete;
  bool has(const Json& object, const std::string& name) const { return names_.contains({&object, name}); }

 private:
  friend class JsonFields;
  std::set<std::pair<const Json*, std::string>> names_;
  FieldsAsked* const before_;
};

// Reads the fields of one object.
class JsonFields {
 public:
  JsonFields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  const Json& object() const { return object_; }
  // The field; null if it is absent or null.
  const Json* find(const char* name) const;
  // Whether the field exists and is null: transformers' None, which is not always the default.
  bool is_null(const char* name) const;
  // Counts these fields as asked for: they are read only in some objects.
  void know(std::initializer_list<const char*> names) const;
  std::int64_t integer(const char* name, std::int64_t least, std::int64_t most) const;
  std::int64_t integer_or(const char* name, std::int64_t fallback, std::int64_t least, std::int64_t most) const;
  double number_or(const char* name, double fallback, double least, double most) const;
  bool boolean_or(const char* name, bool fallback) const;
  std::string text_or(const char* name, const std::string& fallback) const;
  [[noreturn]] void fail(const char* name, const std::string& detail) const;

 private:
  const Json& object_;
  std::string where_;
};

}  // namespace tierflow
