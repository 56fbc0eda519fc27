#include "io/bench.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <ctime>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include "io/backend.h"

namespace tierflow::io {
namespace {

constexpr std::uint64_t kSpeedBytes = std::uint64_t{256} << 20;
constexpr std::uint64_t kLeastSpeedBytes = std::uint64_t{8} << 20;

enum class Pattern { write, read, mixed };

const Error kStopped{.kind = ErrorKind::cancelled, .operation = "bench", .detail = "stopped"};

double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

struct Rate {
  double gb_s = 0;
  double cores_per_gb_s = 0;
};

// Keeps `lanes` requests in flight over the volume, each lane's next one submitted by the completion of its last.
class Pass {
 public:
  Pass(Volume& volume, const BenchOptions& options, unsigned lanes, Pattern pattern, double seconds)
      : volume_(volume),
        block_(options.block),
        blocks_(volume.size() / options.block),
        lanes_(lanes),
        pattern_(pattern),
        seconds_(seconds),
        stop_(options.stop) {}

  Error run(std::vector<Buffer>& buffers, Rate& rate) {
    const double processor = processor_seconds();
    started_ = std::chrono::steady_clock::now();
    const unsigned lanes = static_cast<unsigned>(std::min<std::uint64_t>(lanes_, blocks_));
    running_ = lanes;
    for (unsigned lane = 0; lane < lanes; ++lane) next(std::move(buffers[lane]));
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started_;
    for (unsigned lane = 0; lane < lanes; ++lane) buffers[lane] = std::move(returned_[lane]);
    if (error_) return error_;
    rate.gb_s = 1e-9 * static_cast<double>(moved_) * static_cast<double>(block_) / elapsed.count();
    rate.cores_per_gb_s = (processor_seconds() - processor) / elapsed.count() / rate.gb_s;
    return {};
  }

 private:
  bool more(std::uint64_t index) const {
    if (index < blocks_) return true;
    return seconds_ > 0 &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count() < seconds_;
  }

  void next(Buffer buffer) {
    if (stop_ && stop_()) return end(std::move(buffer), kStopped);
    const std::uint64_t index = issued_.fetch_add(1);
    if (!more(index)) return end(std::move(buffer), {});
    // Mixed: reads walk through one half and writes through the other, and change sides at each pass.
    std::uint64_t position = index % blocks_;
    Op op = pattern_ == Pattern::write ? Op::write : Op::read;
    if (pattern_ == Pattern::mixed) {
      op = index % 2 == 0 ? Op::read : Op::write;
      position = (index / 2 + (index % 2) * (blocks_ / 2)) % blocks_;
    }
    volume_.submit(Request{.op = op, .offset = position * block_, .length = block_, .buffer = std::move(buffer)},
                   [this](Completion&& completion) {
                     if (completion.error) return end(std::move(completion.buffer), std::move(completion.error));
                     moved_.fetch_add(1);
                     next(std::move(completion.buffer));
                   });
  }

  void end(Buffer buffer, Error error) {
    std::lock_guard lock(mutex_);
    returned_.push_back(std::move(buffer));
    if (error && !error_) error_ = std::move(error);
    if (--running_ == 0) finished_.notify_all();
  }

  Volume& volume_;
  const std::size_t block_;
  const std::uint64_t blocks_;
  const unsigned lanes_;
  const Pattern pattern_;
  const double seconds_;
  const std::function<bool()>& stop_;
  std::chrono::steady_clock::time_point started_;
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<std::uint64_t> moved_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::vector<Buffer> returned_;
  Error error_;
  unsigned running_ = 0;
};

VolumeOptions volume_options(const BenchOptions& options) {
  VolumeOptions wanted;
  wanted.folders = options.folders;
  wanted.name = "tierflow-bench";
  const std::uint64_t least = std::uint64_t{2} * options.block * options.folders.size();
  wanted.bytes = std::max(options.bytes / options.block * options.block, least);
  wanted.engine = options.engine;
  wanted.depth = options.depth;
  wanted.block = options.block;
  wanted.allow_buffered = options.allow_buffered;
  wanted.allow_any_filesystem = options.allow_any_filesystem;
  wanted.speeds = options.speeds;
  return wanted;
}

std::string joined(const std::vector<std::filesystem::path>& paths) {
  std::string text;
  for (const std::filesystem::path& path : paths) {
    if (!text.empty()) text += ',';
    text += path.string();
  }
  return text;
}

// A block for each lane, of bytes that no drive can compress or share.
Result<std::vector<Buffer>> random_blocks(std::size_t block, unsigned lanes) {
  const auto memory = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(getpagesize());
  if (block > memory / 4 / std::max(lanes, 1U)) {
    return Error{.kind = ErrorKind::usage,
                 .operation = "bench",
                 .detail = std::to_string(lanes) + " blocks of " + std::to_string(block) +
                           " bytes in flight are more than a quarter of the memory: choose a smaller block or depth"};
  }
  std::vector<Buffer> blocks = allocate_buffers(lanes, block);
  if (blocks.empty()) return Error{.kind = ErrorKind::memory, .operation = "allocate", .length = block * lanes};
  std::mt19937_64 random(1);
  for (const Buffer& each : blocks)
    std::generate_n(reinterpret_cast<std::uint64_t*>(each.data()), each.size() / 8, std::ref(random));
  return blocks;
}

// What allocate_buffers() cut.
std::span<std::byte> together(const std::vector<Buffer>& buffers) {
  return {buffers.front().data(), buffers.back().data() + buffers.back().size()};
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
    result += c;
  }
  return result + "\"";
}

}  // namespace

Result<BenchResult> bench_storage(const BenchOptions& options) {
  if (options.folders.empty() || options.block == 0) {
    return Error{
        .kind = ErrorKind::usage, .operation = "bench", .detail = "name at least one directory and a block size"};
  }
  const auto drives = static_cast<unsigned>(options.folders.size());
  const unsigned lanes = drives == 1 ? options.depth : 2 * options.depth * drives;
  Result<std::vector<Buffer>> made_blocks = random_blocks(options.block, lanes);
  if (!made_blocks) return made_blocks.error();
  // Freed after the volume, which knows this memory: declared first.
  std::vector<Buffer> buffers = std::move(made_blocks).value();

  const VolumeOptions wanted = volume_options(options);
  Result<std::unique_ptr<Volume>> made = Error{.kind = ErrorKind::usage};
  bool fresh = true;
  if (options.keep) {
    made = Volume::open(wanted);
    fresh = !made;
    if (!made && made.error().error_number != ENOENT) return made.error();
  }
  if (fresh) made = Volume::create(wanted);
  if (!made) return made.error();
  const std::unique_ptr<Volume> volume = std::move(made).value();
  struct Cleanup {
    Volume& volume;
    bool keep;
    ~Cleanup() {
      if (!keep) volume.remove_files();
    }
  } cleanup{*volume, options.keep};

  volume->register_memory(together(buffers));
  const VolumeMode mode = volume->mode();
  BenchResult result{.folders = options.folders,
                     .engine = mode.engine,
                     .direct = mode.direct,
                     .registered_buffers = mode.registered_buffers,
                     .registered_files = mode.registered_files,
                     .bytes = volume->size(),
                     .block = options.block,
                     .depth = options.depth,
                     .speeds = options.speeds,
                     .warnings = mode.warnings};
  const auto measure = [&](const char* phase, Pattern pattern, double seconds, Rate& rate) {
    if (options.progress)
      options.progress(std::string(engine_name(mode.engine)) + " on " + joined(options.folders) + ": " + phase);
    return Pass(*volume, options, lanes, pattern, seconds).run(buffers, rate);
  };
  Rate rate;
  // Space that was only reserved reads as zeros without touching the drive, and its first write is dearer.
  if (fresh) {
    if (Error error = measure("filling", Pattern::write, 0, rate)) return error;
    result.first_write_gb_s = rate.gb_s;
    if (Error error = volume->flush()) return error;
  }
  if (options.write) {
    if (Error error = measure("writing", Pattern::write, options.seconds, rate)) return error;
    result.write_gb_s = rate.gb_s;
    result.write_cores_per_gb_s = rate.cores_per_gb_s;
  }
  if (options.read) {
    if (Error error = measure("reading", Pattern::read, options.seconds, rate)) return error;
    result.read_gb_s = rate.gb_s;
    result.read_cores_per_gb_s = rate.cores_per_gb_s;
  }
  if (options.mixed) {
    if (Error error = measure("both at once", Pattern::mixed, options.seconds, rate)) return error;
    result.mixed_gb_s = rate.gb_s;
  }
  DriveStats drives_together;
  for (const DriveStats& drive : volume->stats()) drives_together.add(drive);
  result.write_latency = drives_together.write_latency;
  result.read_latency = drives_together.read_latency;
  return result;
}

std::string BenchResult::json() const {
  const auto microseconds = [](std::chrono::nanoseconds time) { return static_cast<double>(time.count()) * 1e-3; };
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(4);
  text << R"({"engine":")" << engine_name(engine) << R"(","direct":)" << (direct ? "true" : "false");
  text << R"(,"read_gb_s":)" << read_gb_s << R"(,"write_gb_s":)" << write_gb_s << R"(,"mixed_gb_s":)" << mixed_gb_s
       << R"(,"first_write_gb_s":)" << first_write_gb_s;
  text << R"(,"folders":[)";
  for (std::size_t i = 0; i < folders.size(); ++i) text << (i == 0 ? "" : ",") << quoted(folders[i].string());
  if (!speeds.empty()) {
    text << R"(],"speeds":[)";
    for (std::size_t i = 0; i < speeds.size(); ++i) text << (i == 0 ? "" : ",") << speeds[i];
  }
  text << R"(],"bytes":)" << bytes << R"(,"block":)" << block << R"(,"depth":)" << depth;
  text << R"(,"registered_buffers":)" << (registered_buffers ? "true" : "false");
  text << R"(,"registered_files":)" << (registered_files ? "true" : "false");
  for (const auto& [name, latency] : {std::pair{"read", read_latency}, {"write", write_latency}}) {
    text << ",\"" << name << R"(_latency_us":{"p50":)" << microseconds(latency.p50) << R"(,"p99":)"
         << microseconds(latency.p99) << R"(,"max":)" << microseconds(latency.longest) << "}";
  }
  text << R"(,"read_cores_per_gb_s":)" << read_cores_per_gb_s << R"(,"write_cores_per_gb_s":)" << write_cores_per_gb_s;
  text << R"(,"warnings":[)";
  for (std::size_t i = 0; i < warnings.size(); ++i) text << (i == 0 ? "" : ",") << quoted(warnings[i]);
  text << "]}";
  return text.str();
}

Error bench_engines(const BenchOptions& options, const std::function<void(const BenchResult&)>& report) {
  std::vector<EngineKind> engines = {options.engine};
  if (options.engine == EngineKind::automatic)
    engines = {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads};
  std::vector<std::vector<std::filesystem::path>> sets;
  if (options.folders.size() > 1) {
    for (const std::filesystem::path& directory : options.folders) sets.push_back({directory});
  }
  sets.push_back(options.folders);
  std::map<EngineKind, std::vector<double>> alone;  // what each folder reached, in their order
  for (const std::vector<std::filesystem::path>& set : sets) {
    for (EngineKind engine : engines) {
      BenchOptions one = options;
      one.engine = engine;
      one.folders = set;
      if (set.size() == 1) {
        one.speeds.clear();
      } else if (one.speeds.empty() && alone[engine].size() == set.size()) {
        one.speeds = alone[engine];
      }
      Result<BenchResult> result = bench_storage(one);
      if (result) {
        if (set.size() < options.folders.size()) alone[engine].push_back(result->speed());
        report(*result);
        continue;
      }
      const bool lacks_engine = options.engine == EngineKind::automatic &&
                                result.error().kind == ErrorKind::environment && engine != EngineKind::threads;
      if (!lacks_engine) return result.error();
    }
  }
  return {};
}

double BenchResult::speed() const {
  if (read_gb_s > 0 && write_gb_s > 0) return 2 / (1 / write_gb_s + 1 / read_gb_s);
  return std::max({read_gb_s, write_gb_s, mixed_gb_s});
}

Result<std::vector<double>> measure_speeds(const VolumeOptions& options) {
  std::vector<double> speeds;
  for (const std::filesystem::path& directory : options.folders) {
    BenchOptions bench;
    bench.folders = {directory};
    bench.bytes =
        std::min(kSpeedBytes, std::max<std::uint64_t>(options.bytes / options.folders.size(), kLeastSpeedBytes));
    bench.block = options.block;
    bench.depth = options.depth;
    bench.engine = options.engine;
    bench.mixed = false;
    bench.allow_buffered = options.allow_buffered;
    bench.allow_any_filesystem = options.allow_any_filesystem;
    Result<BenchResult> result = bench_storage(bench);
    if (!result) return result.error();
    speeds.push_back(1e9 * result->speed());
  }
  return speeds;
}

}  // namespace tierflow::io
