#include "runtime/planning/machine_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/planning/stage_cost.h"
#include "runtime/spec/stage_class.h"

namespace tierflow {
namespace {

constexpr double kGB = 1e9, kGiB = 1 << 30, kTera = 1e12;
constexpr const char* kEstimate = "an estimate";

const Figure kLaunch{5e-6, "an estimate: what the host takes to start a kernel of torch"},
    kContext{0.7 * kGB, "an estimate: context, kernels and library handles"};

CardModel geforce(Figure products, Figure attention, Figure memory_rate, double gib, Figure upload, Figure download) {
  return {.products = std::move(products),
          .attention = std::move(attention),
          .memory_rate = std::move(memory_rate),
          .memory = {gib * kGiB, "data sheet"},
          .upload = std::move(upload),
          .download = std::move(download),
          .launch = kLaunch,
          .context = kContext};
}

const std::string kOnPcie4 = "PCIe 4 x16, measured with nvbandwidth (NVIDIA/nvbandwidth, issue 15)",
                  kHopperLink = "PCIe 5 x16, measured with nvbandwidth (NVIDIA/nvbandwidth, issue 24)",
                  kHopperProducts = "0.7 of the data sheet's 989 TFLOP/s, as torchtitan and llmq train",
                  kHopperAttention = "cuDNN, forward 566 and backward 470 (Dao-AILab/flash-attention, issue 1893)";

std::map<std::string, CardModel> cards() {
  return {
      {"rtx3090", geforce({71 * kTera, "data sheet, which als244/ml_dataflow's training reaches"},
                          {42 * kTera, "from als244/ml_dataflow's steps at 16,384 tokens"},
                          {0.91 * 936 * kGB, "0.91 of the data sheet, the share that a 4090 reaches"}, 24,
                          {25 * kGB, kOnPcie4}, {26 * kGB, kOnPcie4})},
      {"rtx4090", geforce({165.2 * kTera, "data sheet at 2.52 GHz; 168 was reached (tinygrad, issue 11390)"},
                          {95 * kTera, "0.58 of the product rate, the share that a 3090 and a 5090 reach"},
                          {920 * kGB, "copies within the card, of 1,008 by the data sheet (NVIDIA/nvbandwidth)"}, 24,
                          {25 * kGB, kOnPcie4}, {26 * kGB, kOnPcie4})},
      {"rtx5090",
       geforce({215 * kTera, "data sheet 209.5; 235 were measured of large products"},
               {120 * kTera, "from als244/ml_dataflow's steps at 16,384 and 32,768 tokens"},
               {1600 * kGB, "0.9 of the data sheet's 1,792"}, 32,
               {50.9 * kGB, "PCIe 5 x16, both directions at once, measured on 8 cards (open-gpu-kernel-modules)"},
               {50.9 * kGB, "PCIe 5 x16, both directions at once, measured on 8 cards (open-gpu-kernel-modules)"})},
      {"h100", geforce({700 * kTera, kHopperProducts}, {500 * kTera, kHopperAttention},
                       {3010 * kGB, "of 3,350 by the data sheet (Dao-AILab/quack)"}, 80, {55 * kGB, kHopperLink},
                       {52.8 * kGB, kHopperLink})},
      {"h200", geforce({700 * kTera, kHopperProducts}, {500 * kTera, kHopperAttention},
                       {4300 * kGB, "0.9 of the data sheet's 4,800"}, 141e9 / kGiB, {55 * kGB, kHopperLink},
                       {52.8 * kGB, kHopperLink})},
  };
}

// Consumer cards are in desktops, the others in servers.
HostModel host_of(const std::string& card, double gib) {
  const bool server = card[0] == 'h';
  return {.memory_rate = server ? Figure{0.73 * 307 * kGB, "0.73 of eight channels of DDR5-4800"}
                                : Figure{65 * kGB, "0.73 of two channels of DDR5-5600"},
          .memory = {gib * kGiB, "as named"},
          .cores = {server ? 32.0 : 16.0, kEstimate},
          .update = {948e6, "tierflow bench optimizer, AVX2, an EPYC of Zen 5 (docs/optimizer.md)"},
          .measure = {4.6e9, "measured by tierflow plan on a Xeon with AVX-512"},
          .checksum = {15 * kGB, "measured by tierflow plan on a Xeon with AVX-512"}};
}

DriveModel drive_of(bool pcie5) {
  const std::string deepspeed = "a quarter of what four drives on PCIe 5 gave (DeepSpeed's DeepNVMe)";
  if (pcie5) return {.read = {6.75 * kGB, deepspeed}, .write = {2.75 * kGB, deepspeed}};
  return {.read = {6.5 * kGB, "a drive on PCIe 4 x4: 0.9 of its data sheet"},
          .write = {4.0 * kGB, "a drive on PCIe 4 x4, beyond its cache: from LoHan's steps with 1 to 12 drives"}};
}

// "128" and "gb" of "128gb"; nothing where it does not begin with a number.
std::optional<std::pair<int, std::string>> number_and_unit(const std::string& word) {
  int number = 0;
  const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || number <= 0) return std::nullopt;
  return std::pair{number, std::string(static_cast<const char*>(rest), word.data() + word.size())};
}

[[noreturn]] void unknown(const std::string& name) {
  std::string known;
  for (const auto& [card, unused] : cards()) known += (known.empty() ? "" : ", ") + card;
  throw Exception(
      io::ErrorKind::usage,
      fmt::format("--machine \"{}\" is not known: give CARD-RAMgb, or CARD-RAMgb-Nnvme (nvme5 on PCIe 5), with "
                  "a CARD of {}, such as rtx4090-128gb-2nvme",
                  printable(name), known));
}

double least_of(double a, double b) {
  return a > 0 && b > 0 ? std::min(a, b) : std::max(a, b);
}

}  // namespace

MachineModel find_machine(const std::string& name) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('-', at), name.size());
    words.push_back(name.substr(at, end - at));
    at = end + 1;
  }
  const auto all = cards();
  const auto card = all.find(words[0]);
  if (card == all.end() || words.size() < 2 || words.size() > 3) unknown(name);
  const auto ram = number_and_unit(words[1]);
  if (!ram || ram->second != "gb" || ram->first > 1 << 16) unknown(name);
  MachineModel machine{.name = name, .card = card->second, .host = host_of(card->first, ram->first)};
  if (words.size() == 2) return machine;
  const auto drives = number_and_unit(words[2]);
  if (!drives || (drives->second != "nvme" && drives->second != "nvme5") || drives->first > 64) unknown(name);
  machine.drives = drives->first;
  machine.drive = drive_of(drives->second == "nvme5");
  return machine;
}

std::vector<std::pair<std::string, Figure>> MachineModel::figures() const {
  std::vector<std::pair<std::string, Figure>> all{
      {"card products", card.products}, {"card attention", card.attention}, {"card memory rate", card.memory_rate},
      {"card memory", card.memory},     {"card upload", card.upload},       {"card download", card.download},
      {"card launch", card.launch},     {"card context", card.context},     {"host memory rate", host.memory_rate},
      {"host memory", host.memory},     {"host cores", host.cores},         {"core update", host.update},
      {"core measure", host.measure},   {"core checksum", host.checksum}};
  if (drives > 0) all.insert(all.end(), {{"drive read", drive.read}, {"drive write", drive.write}});
  return all;
}

MachineProfile machine_profile(const MachineModel& machine) {
  const CardModel& card = machine.card;
  const HostModel& host = machine.host;
  const double cores = host.cores.value, on_card = card.memory_rate.value;
  MachineProfile profile{.rates = {.disk_read = machine.drives * machine.drive.read.value,
                                   .disk_write = machine.drives * machine.drive.write.value,
                                   .upload = card.upload.value,
                                   .download = card.download.value,
                                   .cast = card.download.value / 2,  // it writes bf16 over the link
                                   .fill = on_card,
                                   .measure = least_of(cores * host.measure.value, host.memory_rate.value / 2),
                                   .checksum = least_of(host.checksum.value, host.memory_rate.value),
                                   .memory = host.memory_rate.value,
                                   .cores = static_cast<int>(cores),
                                   .threads = static_cast<int>(cores),
                                   .compute_on_cores = false}};
  constexpr double kGradient = 2, kWords = 4, kRounding = 6;  // bytes: bf16; read and written; fp32 to bf16
  for (const Precision precision :
       {Precision::fp32_master_adam8, Precision::fp32_master_adam32, Precision::bf16_sr_adam8})
    for (const auto& [format, name] : state_formats(precision)) {
      double state = 0;  // bytes a parameter
      for (const StatePart& part : state_parts(format))
        state += static_cast<double>(part.bytes) / static_cast<double>(part.each);
      const double bytes = kGradient + kWords + 2 * state;
      profile.update[name] = least_of(cores * host.update.value, host.memory_rate.value / bytes);
      profile.device_update[name] = on_card / (bytes + kRounding);
    }
  return profile;
}

ModelProfile model_profile(const ModelSpec& spec, const SessionOptions& options, const MachineModel& machine) {
  const CardModel& card = machine.card;
  // The host starts kernels ahead of the card: the slower of both sets the pace.
  const auto seconds = [&](double products, double attention, double bytes, double launches) {
    return std::max(products / card.products.value + attention / card.attention.value + bytes / card.memory_rate.value,
                    launches * card.launch.value);
  };
  ModelProfile profile{.device_fixed = static_cast<std::uint64_t>(card.context.value), .process_bytes = 2'000'000'000};
  std::uint64_t handed = 0;
  // Else it is computed again from its swapped inputs (device_attention.h).
  const bool swaps_attention = spec.config.attention_softcap <= 0;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) {
    const int together = spec.stages[stage].together ? micro_batches_together(options) : 1;
    const StageCost cost = stage_cost(spec, stage, together * options.micro_batch, options.sequence_length);
    handed = std::max(handed, cost.handed_bytes / together);
    profile.stage_peak = std::max(profile.stage_peak, cost.peak);
    profile.keeping_peak = std::max(profile.keeping_peak, cost.keeping_peak);
    const double forward = seconds(cost.forward_products, cost.attention, cost.forward_bytes, cost.forward_launches),
                 backward = seconds(cost.backward_products, kAttentionBackward * cost.attention, cost.backward_bytes,
                                    cost.backward_launches),
                 again = seconds(cost.forward_products - cost.last_product, cost.attention, cost.forward_bytes,
                                 cost.forward_launches),
                 copied = 2 * static_cast<double>(cost.swapped_bytes) / card.memory_rate.value,
                 restored = cost.restored_bytes / card.memory_rate.value +
                            (swaps_attention ? 0 : cost.attention / card.attention.value);
    const bool block = spec.stages[stage].block >= 0;
    profile.stages[stage_class(spec, stage)] = {.carry_bytes = cost.carry_bytes,
                                                .activation_bytes = cost.activation_bytes,
                                                .swapped_bytes = cost.swapped_bytes,
                                                .seconds = {.forward = forward,
                                                            .backward = backward + (block ? again : 0),
                                                            .head = forward + backward,
                                                            .evaluate = forward / together,
                                                            .forward_keeping = forward,
                                                            .backward_kept = backward,
                                                            .forward_swapping = forward + copied,
                                                            .backward_swapped = backward + copied + restored}};
  }
  profile.held_peak = profile.stage_peak;
  profile.micro_batch_bytes = 2 * handed + shared_bytes(spec, options.micro_batch, options.sequence_length);
  return profile;
}

std::uint64_t device_budget(const MachineModel& machine) {
  return static_cast<std::uint64_t>(machine.card.memory.value - machine.card.context.value) / 10 * 9;
}

std::uint64_t host_budget(const MachineModel& machine) {
  return static_cast<std::uint64_t>(machine.host.memory.value) / 8 * 7;
}

}  // namespace tierflow
