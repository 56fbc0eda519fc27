#include "runtime/program/session_settings.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/device/gpu_monitor.h"
#include "runtime/program/loss_options.h"
#include "swap/device.h"

namespace tierflow {

std::string device_of(const RunOptions& options) {
  return options.device == "auto" ? (swap::cuda_available() ? "cuda" : "cpu") : options.device;
}

namespace {

// All but device, drives and budgets.
SessionOptions plain_settings(const RunOptions& options) {
  SessionOptions result;
  result.engine = engine_kind(options.engine);
  result.allow_buffered = options.allow_buffered;
  result.fresh = options.fresh;
  result.allow_any_filesystem = options.allow_any_filesystem;
  result.micro_batch = options.micro_batch;
  result.sequence_length = options.sequence_length;
  result.update_threads = options.threads;
  result.on_notice = [](const io::Notice& notice) {
    // One call: other threads write there too.
    const std::string line = "warning: " + notice.text + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  };
  return result;
}

SessionOptions with_training(SessionOptions result, const TrainOptions& options) {
  result.precision = parse_precision(options.precision);
  result.clip = options.clip;
  result.loss = loss_rule(options);
  result.micro_batch = options.micro_batch * sequences_in_one(options);
  result.micro_batches = static_cast<int>(options.micro_batches);
  result.seed = options.seed;
  result.keep_store = options.no_export;
  result.go_back = options.go_back;
  result.commit_every = commit_every(options.durability, result.commit_auto);
  result.write_limit = static_cast<std::uint64_t>(std::llround(1e12 * options.max_tb_written));
  return result;
}

// 0 where it is unknown. The driver's library is asked first: what the CUDA runtime is asked makes a context, whose
// memory nobody could measure afterwards.
std::uint64_t card_bytes_free() {
  const auto card = swap::cuda_device_info(0);
  const auto monitor = card.ok() ? GpuMonitor::open(card.value().pci_bus) : nullptr;
  const auto free = monitor == nullptr ? std::nullopt : monitor->bytes_free();
  return free ? *free : swap::cuda_bytes_free(0);
}

}  // namespace

void check_device_memory(std::uint64_t asked, std::uint64_t fixed, std::uint64_t free) {
  if (free == 0 || asked <= fixed + free) return;
  throw Exception(
      io::ErrorKind::usage,
      fmt::format("--device-memory asks for {} and the card has {} free: give less, or end what else uses it",
                  human_bytes(asked), human_bytes(fixed + free)));
}

SessionOptions session_settings(const RunOptions& options, std::uint64_t device_fixed, const Say& say) {
  SessionOptions result = plain_settings(options);
  result.device = device_of(options);
  result.storage = options.storage;
  const std::uint64_t available = memory_available();
  result.device_memory = options.device_memory != 0 ? options.device_memory : available / 3;
  if (const std::uint64_t free = result.device == "cuda" ? card_bytes_free() : 0; free != 0) {
    if (options.device_memory == 0) result.device_memory = device_fixed + free / 10 * 9;
    check_device_memory(result.device_memory, device_fixed, free);
  }
  result.host_memory = options.host_memory != 0 ? options.host_memory : available / 2;
  if (options.device_memory == 0 || options.host_memory == 0)
    say(fmt::format("budgets: device {}, host {} ({} are free)", human_bytes(result.device_memory),
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

SessionOptions train_settings(const TrainOptions& options, std::uint64_t device_fixed, const Say& say) {
  return with_training(session_settings(options, device_fixed, say), options);
}

SessionOptions train_settings(const TrainOptions& options, const MachineModel& machine, const Say& say) {
  const auto refuse = [&](const std::string& why) { fail_usage(fmt::format("--machine {} {}", machine.name, why)); };
  if (options.device == "cpu") refuse("computes on its card: leave out --device cpu");
  if (!options.storage.empty())
    refuse(machine.drives == 0 ? "names its drives itself: in place of --storage, add them to its name, as in -2nvme"
                               : "has drives of its own: leave out --storage");
  SessionOptions result = plain_settings(options);
  result.device = "cuda";
  for (int drive = 0; drive < machine.drives; ++drive) result.storage.emplace_back(fmt::format("nvme{}", drive));
  result.device_memory = options.device_memory != 0 ? options.device_memory : device_budget(machine);
  result.host_memory = options.host_memory != 0 ? options.host_memory : host_budget(machine);
  const auto check = [&](const char* option, std::uint64_t asked, double there_is) {
    if (static_cast<double>(asked) > there_is)
      refuse(fmt::format("has {}: give {} less than {}", human_bytes(static_cast<std::uint64_t>(there_is)), option,
                         human_bytes(asked)));
  };
  check("--device-memory", result.device_memory, machine.card.memory.value);
  check("--host-memory", result.host_memory, machine.host.memory.value);
  if (options.device_memory == 0 || options.host_memory == 0) {
    const auto context = static_cast<std::uint64_t>(options.device_memory == 0 ? machine.card.context.value : 0);
    say(fmt::format("budgets: device {}{}, host {}", human_bytes(result.device_memory + context),
                    context == 0 ? "" : fmt::format(" with {} for CUDA's own context", human_bytes(context)),
                    human_bytes(result.host_memory)));
  }
  return with_training(std::move(result), options);
}

}  // namespace tierflow
