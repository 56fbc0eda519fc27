#pragma once
// Parses the text of an option's value. Each function throws Exception (kind usage), which names `option`.
#include <cstdint>
#include <string>

namespace tierflow {

[[noreturn]] void fail_option(const std::string& option, const std::string& detail);

std::int64_t parse_integer(const std::string& text, const std::string& option);
// Finite.
double parse_number(const std::string& text, const std::string& option);
std::uint64_t parse_seed(const std::string& text, const std::string& option);
// 512, 20GiB, 1.5 MiB, 3GB (powers of 1000): bytes.
std::uint64_t parse_bytes(const std::string& text, const std::string& option);
// The shortest text that parse_bytes reads back exactly.
std::string format_bytes(std::uint64_t bytes);

}  // namespace tierflow
