#pragma once
// Measures how fast folders are through a Volume: sequential writes, reads, and both at once. `tierflow bench storage`
// prints the results, and a volume over unequal drives chooses its stripes by them.
#include <functional>
#include <string>
#include <vector>

#include "io/volume.h"

namespace tierflow::io {

struct BenchOptions {
  std::vector<std::filesystem::path> folders;
  std::uint64_t bytes = std::uint64_t{1} << 30;  // of the whole file or, over several folders, of all files together
  std::size_t block = std::size_t{1} << 20;
  unsigned depth = 32;
  EngineKind engine = EngineKind::automatic;
  bool write = true, read = true, mixed = true;  // what to measure
  double seconds = 0;                            // repeat passes over the file for this long; 0: one pass
  bool allow_buffered = false;
  bool allow_any_filesystem = false;
  std::vector<double> speeds;  // as in VolumeOptions
  bool keep = false;           // reuse the file of an earlier run, and leave it behind

  // Called before each request, on any thread. true: the files are removed, and bench_storage() returns an error of
  // kind cancelled.
  std::function<bool()> stop;
  std::function<void(const std::string& phase)> progress;  // hears what is about to be measured
};

struct BenchResult {
  std::vector<std::filesystem::path> folders;
  EngineKind engine = EngineKind::threads;
  bool direct = false, registered_buffers = false, registered_files = false;
  std::uint64_t bytes = 0;
  std::size_t block = 0;
  unsigned depth = 0;
  std::vector<double> speeds;                            // proportion of the stripes; empty: equal
  double write_gb_s = 0, read_gb_s = 0, mixed_gb_s = 0;  // 10^9 bytes a second; 0 where not measured
  double first_write_gb_s = 0;  // of the pass that fills new files, which is dearer; 0 where they were there
  double write_cores_per_gb_s = 0, read_cores_per_gb_s = 0;  // processor time of the whole process
  Latency write_latency, read_latency;                       // of the slowest drive, all passes together
  std::vector<std::string> warnings;

  double speed() const;      // 2/(1/w + 1/r) of writing and reading, GB/s; if only one was measured, its speed
  std::string json() const;  // one line, one object
};

// Blocks until done. The files, and folders that did not exist, are created for the purpose and removed, whatever the
// outcome.
Result<BenchResult> bench_storage(const BenchOptions& options);

// Measures the engine that options.engine names; if it is automatic, every engine that works on this machine. With
// several folders, each is measured alone, then all together, striped by the speeds of each alone unless options.speeds
// has others. `report` gets each result as soon as it is measured. The first error ends the measurement; an engine that
// this machine lacks is no error.
Error bench_engines(const BenchOptions& options, const std::function<void(const BenchResult&)>& report);

// BenchResult::speed() of each folder, in bytes a second, for VolumeOptions::speeds.
Result<std::vector<double>> measure_speeds(const VolumeOptions& options);

}  // namespace tierflow::io
