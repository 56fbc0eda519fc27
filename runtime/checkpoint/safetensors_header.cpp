#include "runtime/checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"

namespace tierflow {
namespace {

constexpr std::size_t most_dimensions = 16;

// Bits of one element, 0 for a name that the format does not know.
unsigned dtype_bits(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, unsigned>, 21> known = {{
      {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
      {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},
      {"U32", 32},    {"F32", 32},    {"I64", 64},    {"U64", 64}, {"F64", 64}, {"C64", 64},  {"C128", 128},
  }};
  for (const auto& [dtype, bits] : known)
    if (dtype == name) return bits;
  return 0;
}

class EntryReader {
 public:
  EntryReader(const std::string& where, const std::string& name) : where_(where), name_(name) {}

  HeaderEntry read(const Json& value) const {
    if (name_.empty() || name_.size() > 1024) refuse("has a name that is empty or longer than 1024 bytes");
    if (!value.is_object()) refuse("is not described by an object");
    HeaderEntry entry{.name = name_};
    for (const auto& [key, field] : value.items()) {
      if (key == "dtype" && field.is_string()) {
        entry.dtype = field.get<std::string>();
      } else if (key == "shape" && field.is_array()) {
        if (field.size() > most_dimensions) refuse(fmt::format("has more than {} dimensions", most_dimensions));
        for (const Json& size : field) entry.shape.push_back(static_cast<std::int64_t>(natural(size, "shape")));
      } else if (key == "data_offsets" && field.is_array() && field.size() == 2) {
        entry.begin = natural(field[0], "data_offsets");
        entry.end = natural(field[1], "data_offsets");
      } else {
        refuse(fmt::format("has an unknown or malformed field \"{}\"", printable(key)));
      }
    }
    if (value.size() != 3) refuse("must have dtype, shape and data_offsets");
    return entry;
  }

  void check_size(const HeaderEntry& entry) const {
    if (entry.begin > entry.end)
      refuse(fmt::format("has offsets that run backwards, {} to {}", entry.begin, entry.end));
    std::uint64_t bits = dtype_bits(entry.dtype);
    if (bits == 0) refuse(fmt::format("has the unknown dtype \"{}\"", printable(entry.dtype)));
    for (const std::int64_t size : entry.shape)
      if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits))
        refuse("has a shape whose size overflows");
    if (bits % 8 != 0 || bits / 8 != entry.end - entry.begin)
      refuse(fmt::format("has {} bytes, but its shape and dtype take {}", entry.end - entry.begin, bits / 8));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    fail_input(where_, fmt::format("tensor \"{}\" {}", printable(name_), what));
  }

 private:
  std::uint64_t natural(const Json& value, const char* field) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX)
      refuse(fmt::format("has {} that are not whole numbers from 0 to 2^63-1", field));
    return value.get<std::uint64_t>();
  }

  const std::string& where_;
  const std::string& name_;
};

}  // namespace

std::vector<HeaderEntry> parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                                  const std::string& where,
                                                  std::map<std::string, std::string>* metadata) {
  if (json.empty() || json.front() != '{')
    fail_input(where, "is not a safetensors file: its header does not start with {");
  const Json root = parse_json(json, where, 8);
  std::vector<HeaderEntry> entries;
  entries.reserve(root.size());
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      const bool texts =
          value.is_object() && std::all_of(value.begin(), value.end(), [](const Json& v) { return v.is_string(); });
      if (!texts) fail_input(where, "has a __metadata__ that is not an object of strings");
      if (metadata != nullptr) *metadata = value.get<std::map<std::string, std::string>>();
      continue;
    }
    const EntryReader reader(where, name);
    entries.push_back(reader.read(value));
    reader.check_size(entries.back());
  }
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t next = 0;
  for (const HeaderEntry& entry : entries) {
    if (entry.begin != next)
      EntryReader(where, entry.name)
          .refuse(fmt::format("starts at byte {} where the one before it ends at {}: tensors {}", entry.begin, next,
                              entry.begin < next ? "overlap" : "leave a hole"));
    next = entry.end;
  }
  if (next != data_bytes)
    fail_input(where,
               fmt::format("holds {} bytes of tensors but its header describes {}: the file is {}", data_bytes, next,
                           data_bytes < next ? "truncated; copy or download it again" : "longer than it says"));
  return entries;
}

}  // namespace tierflow
