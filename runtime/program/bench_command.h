#pragma once
// `tierflow bench`: what the drives and the processor of this machine can do, measured without LibTorch.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace tierflow {

struct BenchStorageOptions {
  std::vector<std::filesystem::path> folders;
  std::uint64_t size = std::uint64_t{1} << 30;  // bytes of the file; with several folders, of all files together
  std::uint64_t block = std::uint64_t{1} << 20;
  int depth = 32;
  std::string engine = "auto";  // auto: each one that works on this machine
  std::string measure = "all";  // all, write, read, mixed
  double seconds = 0;           // 0: one pass over the file
  bool keep = false;
  bool allow_buffered = false, allow_any_filesystem = false;
  bool json = false;
};

struct BenchOptimizerOptions {
  std::int64_t elements = 64 << 20;
  int threads = 0;  // 0: as many as the machine has
  int repeats = 7;
  std::string only;  // kernels whose name contains this; empty: all
  bool peers = false;
  bool json = false;
};

// The words after `tierflow bench storage` and `tierflow bench optimizer`. Throw Exception of kind usage.
BenchStorageOptions parse_bench_storage(const std::vector<std::string>& words);
BenchOptimizerOptions parse_bench_optimizer(const std::vector<std::string>& words);
// The help text of "storage" or "optimizer"; of both and how they differ for anything else.
std::string bench_help(const std::string& what, std::size_t columns);

// Print each result on standard output as soon as it is measured: a row of a table, or a JSON object on a line. What is
// being measured goes to standard error. Throw Exception. Files of the measurement are removed on every way out, also
// when `stop` turns true (Exception of kind cancelled).
void bench_storage(const BenchStorageOptions& options, const std::function<bool()>& stop);
void bench_optimizer(const BenchOptimizerOptions& options);

}  // namespace tierflow
