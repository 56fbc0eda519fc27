#pragma once
// FRONT DOOR of io. A Volume is one linear space of bytes laid over one data file in each of several folders (on
// different drives). Everything above io reads and writes through it.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/buffer.h"
#include "io/error.h"

namespace tierflow::io {

enum class Op : std::uint8_t { read, write };

// Moves buffer.bytes().first(length) from or to [offset, offset + length) of the volume. offset and length are
// multiples of Volume::alignment(), buffer.data() is aligned to it; anything else is a usage error in the completion.
struct Request {
  Op op = Op::read;
  std::uint64_t offset = 0;
  std::size_t length = 0;
  Buffer buffer;
};

// Without an error every byte of the request was moved. The buffer comes back either way, with one exception: where a
// request outlives stall_limit (error ETIMEDOUT) the drive may still write to the memory, and the Completion's buffer
// is empty. The volume keeps such a buffer until the drive answers, beyond the Volume's own life if need be.
struct Completion {
  Buffer buffer;
  Error error;
};
using Callback = std::function<void(Completion&&)>;

enum class EngineKind : std::uint8_t { automatic, io_uring, libaio, threads };
const char* engine_name(EngineKind kind);

// A message for the user while the run goes on. It arrives on the volume's own thread; the receiver must not block.
struct Notice {
  enum class Kind : std::uint8_t {
    stalled,      // a request has waited longer than stall_warning; once for each stall
    retried,      // a read failed at the drive and then succeeded
    write_limit,  // write_limit was passed; once. Nothing is refused: stop at the next point where stopping is clean.
  };
  Kind kind = Kind::stalled;
  std::string text;
};

class Backend;  // io/backend.h

struct VolumeOptions {
  std::vector<std::filesystem::path> folders;  // created if they do not exist; one data file "<name>.tfv" in each
  std::string name = "state";
  std::uint64_t bytes = 0;  // size of the linear space; only create() uses it
  EngineKind engine = EngineKind::automatic;
  unsigned depth = 32;                       // requests in flight at the kernel, per drive
  std::size_t block = std::size_t{1} << 20;  // largest single kernel request, and the stripe unit over several folders
  bool allow_buffered = false;               // use the page cache if O_DIRECT is refused
  bool allow_any_filesystem = false;         // accept tmpfs, NFS and the like, where the "drive" is RAM or remote
  // Only for open(): nothing is written, so a file system mounted read-only will do. Others may read the files at the
  // same time.
  bool read_only = false;
  // With read_only: open the files even while another process has them open for writing. A read may then bring a part
  // of what that process writes.
  bool beside_owner = false;

  // Relative speeds of the drives, in the order of `folders`: the stripes are dealt out in this proportion. Empty:
  // equal, unless measure_speeds asks create() to measure each drive first (at most 256 MiB, written twice and
  // read). Folders on one drive are equal without measuring.
  std::vector<double> speeds;
  bool measure_speeds = false;

  std::chrono::milliseconds stall_warning{30'000};  // 0: none
  // If the drive does not answer a request within this time, the whole volume fails: see Completion. 0: wait for ever.
  std::chrono::milliseconds stall_limit{300'000};
  std::uint64_t write_limit = 0;  // bytes written by this Volume after which on_notice hears of it; 0: none
  std::function<void(const Notice&)> on_notice;

  // For tests: what this returns stands between the engine and the kernel. Called once for each engine that is tried.
  std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)> wrap_backend;
};

// What is in use, which may be less than what VolumeOptions asked for.
struct VolumeMode {
  EngineKind engine = EngineKind::threads;
  bool direct = false;              // O_DIRECT
  bool registered_buffers = false;  // fixed buffers in use
  bool registered_files = false;
  std::size_t alignment = 4096;
  std::vector<std::string> warnings;  // one line for each step down, with the remedy
};

struct Latency {
  std::uint64_t count = 0;
  std::chrono::nanoseconds p50{0}, p99{0}, longest{0};
};

// Since the Volume was made. Operations are kernel requests of at most VolumeOptions::block bytes.
struct DriveStats {
  std::filesystem::path directory;
  std::uint64_t bytes_read = 0, bytes_written = 0;
  std::uint64_t reads = 0, writes = 0;
  std::uint64_t flushes = 0;
  std::uint64_t retries = 0;  // short transfers continued, and requests issued again
  unsigned in_flight = 0;     // requests at the kernel now
  unsigned peak_in_flight = 0;
  double mean_in_flight = 0;         // over the time in which the drive was busy
  std::chrono::nanoseconds busy{0};  // with at least one read or write in flight
  Latency read_latency, write_latency, flush_latency;

  // Adds the statistics of another volume on the same drive. Counts are added up; of times and latencies the larger one
  // is kept.
  void add(const DriveStats& other);
};

class Volume {
 public:
  // Creates (exclusively, mode 0600, preallocated, locked) or opens the data files. Errors: locked, where another
  // process holds a folder (names its pid); environment, where space is too little (names bytes needed and free),
  // O_DIRECT is refused or the file system is not accepted; input, where the folders are not those of one volume;
  // usage, for wrong options. create() leaves nothing behind when it fails.
  static Result<std::unique_ptr<Volume>> create(const VolumeOptions& options);
  static Result<std::unique_ptr<Volume>> open(const VolumeOptions& options);

  virtual ~Volume() = default;  // waits for everything in flight; callbacks still run

  // Registers memory with the kernel: buffers inside one of these pieces then need not be pinned for each request. A
  // piece above 1 GiB is registered as several pieces of 1 GiB, from its beginning. Call before the first submit; the
  // memory must outlive the Volume. If the kernel refuses, that is no error: mode() says so.
  virtual void register_memory(std::span<const std::span<std::byte>> pieces) = 0;
  void register_memory(std::span<std::byte> memory) { register_memory({&memory, 1}); }

  // Any thread; never blocks on the drive. `done` runs exactly once, on the volume's own thread, and must not block.
  virtual void submit(Request request, Callback done) = 0;

  // Any thread except the volume's own. Returns when every write completed before the call is durable. After a failed
  // flush every later flush fails too: the data written since the last good one must be considered lost. Also an error
  // where a data file was cut, replaced or removed.
  virtual Error flush() = 0;

  // Removes the data files, and those folders that create() made and that are then empty. When the Volume is destroyed,
  // nothing of it is left on the drives.
  virtual void remove_files() = 0;

  virtual std::uint64_t size() const = 0;
  virtual std::size_t alignment() const = 0;
  // Relative speeds of the drives, as VolumeOptions::speeds.
  virtual std::vector<double> speeds() const = 0;
  virtual VolumeMode mode() const = 0;
  virtual std::vector<DriveStats> stats() const = 0;
};

}  // namespace tierflow::io
