// Measures folders through io alone, one JSON line a result:
//   storage_bench --dir D[,D...] [--size BYTES] [--block BYTES] [--depth N] [--engine
//   automatic|io_uring|libaio|threads]
//                 [--phase write|read|mixed] [--seconds S] [--speeds A,B] [--keep] [--any] [--unregistered]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "io/bench.h"

using namespace tierflow::io;

namespace {

std::vector<std::string> parts(const std::string& list) {
  std::vector<std::string> result;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) result.push_back(part);
  return result;
}

bool parse(int count, char** arguments, BenchOptions& options) {
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--keep") {
      options.keep = true;
    } else if (name == "--any") {
      options.allow_any_filesystem = options.allow_buffered = true;
    } else if (name == "--unregistered") {
      options.register_memory = false;
    } else if (i + 1 == count) {
      return false;
    } else {
      const std::string value = arguments[++i];
      if (name == "--dir") {
        for (const std::string& part : parts(value)) options.directories.emplace_back(part);
      } else if (name == "--size") {
        options.bytes = std::strtoull(value.c_str(), nullptr, 10);
      } else if (name == "--block") {
        options.block = std::strtoull(value.c_str(), nullptr, 10);
      } else if (name == "--depth") {
        options.depth = static_cast<unsigned>(std::strtoul(value.c_str(), nullptr, 10));
      } else if (name == "--seconds") {
        options.seconds = std::strtod(value.c_str(), nullptr);
      } else if (name == "--speeds") {
        for (const std::string& part : parts(value)) options.speeds.push_back(std::strtod(part.c_str(), nullptr));
      } else if (name == "--phase") {
        options.write = value == "write";
        options.read = value == "read";
        options.mixed = value == "mixed";
      } else if (name == "--engine") {
        options.engine = value == "io_uring"  ? EngineKind::io_uring
                         : value == "libaio"  ? EngineKind::libaio
                         : value == "threads" ? EngineKind::threads
                                              : EngineKind::automatic;
      } else {
        return false;
      }
    }
  }
  return !options.directories.empty();
}

}  // namespace

int main(int count, char** arguments) {
  BenchOptions options;
  if (!parse(count, arguments, options)) {
    std::fprintf(stderr, "usage: see the first lines of storage_bench.cpp\n");
    return 2;
  }
  const Error error = bench_engines(options, [](const BenchResult& result) {
    std::printf("%s\n", result.json().c_str());
    std::fflush(stdout);
  });
  if (!error) return 0;
  std::fprintf(stderr, "storage_bench: %s\n", error.message().c_str());
  return static_cast<int>(error.kind);
}
