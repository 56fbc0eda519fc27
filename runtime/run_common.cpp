#include "runtime/run_common.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/device_memory.h"
#include "runtime/exception.h"
#include "runtime/init.h"

namespace tierflow {
namespace {

volatile std::sig_atomic_t first_signal = 0;

void on_signal(int number) {
  if (first_signal != 0) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
  first_signal = number;
}

// What the card is, said once; the log's steps then tell what it does.
void watch_gpu(TrainingLog& log) {
  const auto info = swap::cuda_device_info(0);
  if (!info.ok()) return;
  const swap::CudaDeviceInfo& card = info.value();
  auto gpu = GpuMonitor::open(card.pci_bus);
  const std::string link = gpu == nullptr ? "" : gpu->link(), capability = fmt::format("{}.{}", card.major, card.minor);
  log.say(fmt::format("device: {}, compute capability {}, {}{}{}", card.name, capability, human_bytes(card.bytes),
                      link.empty() ? "" : ", ", link));
  log.object({{"device",
               {{"name", card.name},
                {"compute_capability", capability},
                {"bytes", card.bytes},
                {"pci_bus", card.pci_bus},
                {"link", link}}}});
  log.watch(std::move(gpu));
}

}  // namespace

SessionOptions session_options(const RunOptions& options, TrainingLog& log) {
  DeviceMemory::install();
  if (options.threads > 0) at::set_num_threads(options.threads);
  SessionOptions result;
  result.device = options.device == "auto" ? (swap::cuda_available() ? "cuda" : "cpu") : options.device;
  result.storage = options.storage;
  result.engine = engine_kind(options.engine);
  result.allow_buffered = options.allow_buffered;
  result.allow_any_filesystem = options.allow_any_filesystem;
  result.micro_batch = options.micro_batch;
  result.sequence_length = options.sequence_length;
  result.update_threads = options.threads;
  result.on_notice = [](const io::Notice& notice) {
    // One call: other threads write there too.
    const std::string line = "warning: " + notice.text + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  };
  const std::uint64_t available = memory_available();
  result.device_memory = options.device_memory != 0 ? options.device_memory : available / 3;
  if (result.device == "cuda") {
    const std::uint64_t fixed = DeviceMemory::cuda().fixed(), free = swap::cuda_bytes_free(0);
    if (options.device_memory == 0 && free != 0) result.device_memory = fixed + free / 10 * 9;
    watch_gpu(log);
  } else if (options.device == "auto") {
    const auto info = swap::cuda_device_info(0);
    if (!info.ok())
      log.say("device: CPU; no CUDA device: " + info.error().detail.substr(0, info.error().detail.find(';')));
  }
  result.host_memory = options.host_memory != 0 ? options.host_memory : available / 2;
  if (options.device_memory == 0 || options.host_memory == 0)
    log.say(fmt::format("budgets: device {}, host {} ({} are free)", human_bytes(result.device_memory),
                        human_bytes(result.host_memory), human_bytes(available)));
  const std::uint64_t needed = result.host_memory + (result.device == "cpu" ? result.device_memory : 0);
  if (needed > available)
    throw Exception(
        io::ErrorKind::usage,
        fmt::format(
            "--host-memory and --device-memory ask for {} of RAM and {} are free: give less, or end other programs",
            human_bytes(needed), human_bytes(available)));
  return result;
}

WeightSource random_weights(std::uint64_t seed) {
  return [seed](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial_values(tensor, seed, first, out);
  };
}

MicroBatch micro_batch(const SequenceReader& read, std::int64_t first, std::int64_t rows, std::int64_t length) {
  MicroBatch batch{.ids = torch::empty({rows, length}, torch::kInt64),
                   .labels = torch::full({rows, length}, -100, torch::kInt64)};
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t* ids = batch.ids.data_ptr<std::int64_t>() + row * length;
    read(first + row, {ids, static_cast<std::size_t>(length)});
    std::copy(ids + 1, ids + length, batch.labels.data_ptr<std::int64_t>() + row * length);
  }
  return batch;
}

void watch_signals() {
  first_signal = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  std::signal(SIGXFSZ, SIG_IGN);  // a write past a limit then fails with EFBIG
}

int signals_seen() {
  return first_signal;
}

}  // namespace tierflow
