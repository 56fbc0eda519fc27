#pragma once
// Computes one micro-batch in a stage of each class, on weights of its own, and measures the device memory that this
// takes and, where asked, the time.
#include <functional>
#include <vector>

#include "runtime/device/device_memory.h"
#include "runtime/models/layered_model.h"
#include "runtime/planning/probed_model.h"
#include "runtime/planning/session_options.h"
#include "swap/device.h"

namespace tierflow {

// What a session with these options asks of the head for that micro-batch: the teacher's targets, the most likely
// tokens.
void ask_of_head(Shared& shared, const MicroBatch& batch, const SessionOptions& options);

struct StageTiming {
  swap::Device* device = nullptr;  // null: only memory is measured
  double seconds_each = 1.2;       // a reading is repeated this long, at least three times
  // After each reading: of that stage, its backward or not.
  std::function<void(int stage, bool backward)> done = [](int, bool) {};
};

class StageProbe {
 public:
  static constexpr std::size_t kMostRuns = 30;  // of a reading
  // Bytes that are read and written before each run, so that no cache has the weights.
  static constexpr std::int64_t kSweptBytes = 96 << 20;

  // `timing`: also measure the time, with weights and gradients in memory of its device as a session has them.
  StageProbe(const LayeredModel& model, DeviceMemory& memory, torch::Device torch_device, StageTiming timing = {});

  // Measures one micro-batch of that shape; the stages that take several at once get `together` of them. `head`: the
  // head computes what it computes in a session with these options. If memory runs out, torch's exception passes
  // through.
  ProbedModel measure(std::int64_t micro_batch, std::int64_t sequence_length, bool train,
                      const SessionOptions& head = {}, int together = 1);

 private:
  struct Bound {
    io::Buffer arena;
    Weights weights;
    std::vector<torch::Tensor> gradients;
  };
  struct Given {  // the input of a stage from its neighbours
    Carry input, d_out = {};
  };
  ProbedModel pass(std::int64_t micro_batch, std::int64_t sequence_length, bool train, const SessionOptions& head);
  void forward_keeping(int stage, const Given& given, const Shared& shared, ProbedModel& result,
                       swap::StageSeconds& seconds);
  void backward_kept(int stage, const Given& given, const Shared& shared, std::uint64_t swapped,
                     swap::StageSeconds& seconds);
  Bound bind(const std::vector<int>& units, bool backward);
  // forward() of a stage with units on demand, with the weights of one in the place of each that it needs.
  Carry forward_in_parts(int stage, const Weights& weights, const Weights& needed, const Carry& input,
                         const Shared& shared);
  torch::Tensor slot_of(std::uint64_t bytes) const;
  template <class Work>
  auto run(int stage, bool backward, double& seconds, const Given& given, Work work);
  template <class Work>
  double time(Work work);

  const LayeredModel& model_;
  DeviceMemory& memory_;
  const torch::Device torch_device_;
  const StageTiming timing_;
  swap::Device* const seconds_on_;
  int together_ = 1;
  std::vector<std::uint64_t> peaks_;               // by stage
  std::uint64_t begun_bytes_ = 0;                  // the most that a stage in parts holds from its beginning to its end
  double timed_seconds_ = 0, spread_seconds_ = 0;  // total time of the readings, and their spread
  bool warmed_up_ = false;                         // warmed up: caches kept, untimed
  torch::Tensor swept_;                            // kSweptBytes
};

}  // namespace tierflow
