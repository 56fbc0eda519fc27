#include "io/probe.h"

#include <cerrno>
#include <cstring>

namespace tierflow::io {
namespace {

Result<std::unique_ptr<Backend>> make_backend(EngineKind kind, unsigned depth) {
  switch (kind) {
    case EngineKind::io_uring:
      return make_uring_backend(depth);
    case EngineKind::libaio:
      return make_libaio_backend(depth);
    default:
      return make_threads_backend(depth);
  }
}

// Where an operation never comes back, the engine and its buffers must outlive us.
struct RoundTrip {
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Buffer> buffer;
  std::chrono::seconds limit;
  const std::vector<EngineFile>& files;

  Error perform(Action action, std::uint32_t file, std::uint64_t offset, std::span<std::byte> bytes) {
    Transfer transfer{.action = action, .file = file, .offset = offset, .bytes = bytes, .owner = buffer};
    engine->submit(transfer);
    std::vector<Outcome> outcomes;
    const auto deadline = Engine::Clock::now() + limit;
    while (outcomes.empty()) {
      if (Engine::Clock::now() > deadline) {
        (void)engine.release();
        return Error{.kind = ErrorKind::io,
                     .operation = "probe",
                     .path = files[file].path,
                     .error_number = ETIMEDOUT,
                     .detail = "the drive does not answer"};
      }
      engine->wait(outcomes, std::chrono::seconds{1});
    }
    return outcomes.front().error;
  }
};

Result<std::unique_ptr<Engine>> try_engine(EngineKind kind, const std::vector<EngineFile>& files,
                                           const ProbeOptions& options) {
  Result<std::unique_ptr<Backend>> made = make_backend(kind, options.depth);
  if (!made) return made.error();
  std::unique_ptr<Backend> backend = std::move(made).value();
  if (options.wrap_backend) backend = options.wrap_backend(std::move(backend));

  const std::size_t block = options.alignment;
  const std::size_t bytes = 2 * block;
  RoundTrip trip{.engine = std::make_unique<Engine>(std::move(backend), files, options.depth, block),
                 .buffer = std::make_shared<Buffer>(allocate_buffer(bytes)),
                 .limit = options.limit,
                 .files = files};
  if (!*trip.buffer) return Error{.kind = ErrorKind::memory, .operation = "allocate", .length = bytes};
  if (Error error = trip.engine->start()) return error;

  const std::span<std::byte> memory = trip.buffer->bytes();
  const std::span<std::byte> region[] = {memory};
  const bool registered = !trip.engine->register_memory(region);
  for (std::uint32_t file = 0; file < files.size(); ++file) {
    std::memset(memory.data(), 0x5A + static_cast<int>(file % 64), block);
    std::memset(memory.data() + block, 0, block);
    if (!options.read_only) {
      if (Error error = trip.perform(Action::write, file, options.scratch_offset, memory.first(block))) return error;
      if (Error error = trip.perform(Action::flush, file, 0, {})) return error;
    }
    if (Error error = trip.perform(Action::read, file, options.scratch_offset, memory.last(block))) return error;
    if (!options.read_only && std::memcmp(memory.data(), memory.data() + block, block) != 0) {
      return Error{.kind = ErrorKind::corruption,
                   .operation = "probe",
                   .path = files[file].path,
                   .offset = options.scratch_offset,
                   .length = block,
                   .detail = "the drive returned other bytes than were written"};
    }
  }
  if (registered) {
    if (Error error = trip.engine->register_memory({})) return error;
  }
  return std::move(trip.engine);
}

std::string remedy(EngineKind kind, const Error& error) {
  std::string text = std::string(engine_name(kind)) + " does not work here (" + error.message() + ")";
  if (kind == EngineKind::io_uring && (error.error_number == EPERM || error.error_number == EACCES)) {
    text += "; allow the io_uring system calls in the container's seccomp profile, and set kernel.io_uring_disabled=0";
  }
  return text;
}

}  // namespace

Result<Probed> probe_engine(const std::vector<EngineFile>& files, const ProbeOptions& options) {
  std::vector<EngineKind> ladder;
  if (options.wanted != EngineKind::automatic) {
    ladder = {options.wanted};
  } else if (options.direct) {
    ladder = {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads};
  } else {
    ladder = {EngineKind::io_uring, EngineKind::threads};  // libaio blocks the caller on buffered files
  }
  Probed probed;
  Error last;
  for (EngineKind kind : ladder) {
    Result<std::unique_ptr<Engine>> engine = try_engine(kind, files, options);
    if (engine) {
      probed.engine = std::move(engine).value();
      return probed;
    }
    last = engine.error();
    probed.warnings.push_back(remedy(kind, last));
    // A drive that fails or lies does so under every engine.
    if (last.kind == ErrorKind::corruption || last.error_number == ETIMEDOUT) return last;
  }
  if (options.wanted != EngineKind::automatic) {
    last.detail += std::string(last.detail.empty() ? "" : "; ") + "engine " + engine_name(options.wanted) +
                   " was asked for and does not work here; leave the choice automatic";
  }
  return last;
}

}  // namespace tierflow::io
