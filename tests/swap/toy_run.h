#pragma once
// Steps of the toy model as a client of the executor takes them: the plans, stores, streams and buffers of a real run
// carry it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "swap/arrange.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/store_fixture.h"
#include "tests/swap/toy_model.h"

namespace tierflow::swap::toy {

struct DeafDevice final : testing::ForwardingDevice {
  DeafDevice(std::unique_ptr<Device> device, StreamId deaf_) : ForwardingDevice(std::move(device)), deaf(deaf_) {}
  void wait(StreamId stream, const Event& event) override {
    if (stream != deaf) ForwardingDevice::wait(stream, event);
  }
  const StreamId deaf;
};

struct Case {
  std::uint64_t host = 0, device = 0;
  bool staged = true, tied = false;
  int micro_batches = 2;
  std::uint64_t chaos = 0;
  int generations = 1;
  bool commits_beside = false;  // as tasks, of two generations
  // By step: 's' staged; speculative, of two generations: 'k' it stands, 'u' it is undone and done again. Empty: none
  // is speculative.
  std::string speculation;
  std::function<std::unique_ptr<io::Backend>(std::unique_ptr<io::Backend>)> wrap;
  io::EngineKind engine = io::EngineKind::automatic;
  double deferred = 0;                 // share, where nothing is staged
  double on_device = 0;                // share of the units
  std::chrono::milliseconds pause{0};  // in each computation
  int swap_to_host = 0, swap_to_storage = 0;
  int fewest_swapped = 0;        // visits that must find activations in their slot
  bool async = false;            // computation is enqueued, and the client goes on
  bool rounds_first = false;     // gradients, in slots of the device
  bool measures_there = false;   // and they are measured there
  bool keeps_state = false;      // on the device, where it has room
  bool zeros = false;            // the client knows of gradients that are zeros, though the device has others there
  std::optional<StreamId> deaf;  // a stream of the device that waits for nothing
};

class Run {
 public:
  Run(const Toy& toy, const Case& with) : toy_(toy), case_(with), layout_(toy.units, toy.stages, toy.chunk_elements) {}

  ~Run() {  // what is enqueued works on members
    if (device_ != nullptr) static_cast<void>(device_->synchronize(device_->record(StreamId::compute)));
  }

  void prepare() {
    std::vector<std::uint64_t> swapped(layout_.stages().size(), 0);
    for (std::size_t stage = 1; stage + 1 < swapped.size(); ++stage) swapped[stage] = kSector * (1 + stage);
    auto arrangement = arrange(layout_, {.host_budget = case_.host,
                                         .device_budget = case_.device,
                                         .swapped_bytes = swapped,
                                         .swap_to_host = case_.swap_to_host,
                                         .swap_to_storage = case_.swap_to_storage,
                                         .micro_batches = case_.micro_batches,
                                         .staged = case_.staged,
                                         .deferred_share = case_.deferred,
                                         .device_update_share = case_.on_device,
                                         .gradient_slots = case_.rounds_first,
                                         .measured_bytes = case_.measures_there ? 24U : 0U,
                                         .state_on_device = case_.keeps_state});
    ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
    arrangement_ = std::move(arrangement).value();
    ASSERT_LE(arrangement_.host_bytes(layout_), case_.host);
    ASSERT_LE(arrangement_.device_bytes(), case_.device);
    device_ = open_toy_device(case_.chaos, case_.async);
    if (case_.deaf) device_ = std::make_unique<DeafDevice>(std::move(device_), *case_.deaf);
    std::vector<bool> stored_gradients = arrangement_.deferred;
    for (std::size_t id = 0; id < stored_gradients.size(); ++id)
      stored_gradients[id] = stored_gradients[id] && !arrangement_.stays(ExtentKind::gradient, static_cast<int>(id));
    options_ = {
        .volume = {.folders = {folder_.path()},
                   .engine = case_.engine,
                   .allow_buffered = true,
                   .allow_any_filesystem = true,
                   .wrap_backend = case_.wrap},
        .generations = case_.generations,
        .scratch = {.gradient_chunks = stored_gradients, .activation_bytes = arrangement_.stored_activations()}};
    auto store = Store::create(options_, layout_);
    ASSERT_TRUE(store.ok()) << store.error().message();
    store_ = std::move(store).value();
    auto executor = Executor::create(*device_, store_.get(), layout_, arrangement_, {.chaos_seed = case_.chaos});
    ASSERT_TRUE(executor.ok()) << executor.error().message();
    executor_ = std::move(executor).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
    work_->zeros = case_.zeros;
    for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id) {
      const Chunk& chunk = layout_.chunks()[id];
      ASSERT_OK(executor_->access(ExtentKind::hi, id, true, [&](std::span<std::byte> bytes) {
        for (std::uint64_t i = 0; i < chunk.elements; ++i) {
          const std::uint16_t word = initial_word(chunk.unit, chunk.first + i);
          std::memcpy(bytes.data() + 2 * i, &word, 2);
        }
      }));
      ASSERT_OK(executor_->access(ExtentKind::state, id, true, [&](std::span<std::byte> bytes) {
        for (std::uint64_t i = 0; i < bytes.size(); ++i)
          bytes[i] = i < chunk.elements ? initial_state(chunk.unit, chunk.first + i) : std::byte{0};
      }));
    }
  }

  void speculate() {
    for (int step = 0; step < static_cast<int>(case_.speculation.size()); ++step) {
      const char mode = case_.speculation[step];
      const std::size_t results = results_.size();
      if (mode != 's') {
        ASSERT_NO_FATAL_FAILURE(play(step, Updates::at_once));
        if (mode == 'k') continue;
        ASSERT_OK(executor_->drain());
        ASSERT_OK(store_->go_back());
        executor_->append(planner_->undo(), nullptr);
        ASSERT_OK(executor_->drain());
        ASSERT_NO_FATAL_FAILURE(expect_after_a_crash(step));
        results_.resize(results);
      }
      ASSERT_NO_FATAL_FAILURE(play(step, Updates::as_arranged));
    }
    if (pending_) executor_->append(planner_->flush(), work_);
    ASSERT_OK(executor_->drain());
  }

  void play(int step, Updates updates) {
    const bool speculates = updates == Updates::at_once;
    const auto work = std::make_shared<ToyWork>();
    work->after_steps = step;
    executor_->append(planner_->train_step(pending_, speculates, updates), work);
    ASSERT_NO_FATAL_FAILURE(visits(step));
    ASSERT_OK(executor_->finish_updates());
    const int chunks = static_cast<int>(layout_.chunks().size());
    ASSERT_EQ(work->updated, (pending_ ? deferred_chunks() : 0) + (speculates ? chunks : chunks - deferred_chunks()));
    pending_ = !speculates && deferred_chunks() != 0;
  }

  void train(int steps) {
    if (!case_.speculation.empty()) return speculate();
    for (int step = 0; step < steps; ++step) {
      Plan plan = planner_->train_step(pending_, case_.commits_beside && step > 0);
      if (mutate) mutate(plan);
      for (const Task& task : plan.tasks)
        for (TaskId dependency : task.dependencies) ASSERT_LT(dependency, plan.first_id + (&task - plan.tasks.data()));
      executor_->append(std::move(plan), work_);
      ASSERT_NO_FATAL_FAILURE(visits(step));
      ASSERT_OK(executor_->finish_updates());
      pending_ = deferred_chunks() != 0;
      if (case_.generations == 2 && !case_.commits_beside) commit(step + 1);
      if (HasFatalFailure()) return;
    }
    if (pending_) executor_->append(planner_->flush(), work_);
    ASSERT_OK(executor_->drain());
    if (case_.commits_beside) committed_ = work_->commits;
    if (committed_ != 0) expect_after_a_crash(committed_);
  }

  // Before it is durable a crash leaves the generation before.
  void commit(int steps) {
    if (std::exchange(pending_, false)) executor_->append(planner_->flush(), work_);
    ASSERT_OK(executor_->drain());
    ASSERT_OK(executor_->write_back());
    if (committed_ != 0) expect_after_a_crash(committed_);
    ASSERT_OK(store_->commit(std::to_string(steps)));
    committed_ = steps;
  }

  // What a copy of the drive as it is now opens at: bit for bit what the plain loop has after `steps`.
  void expect_after_a_crash(int steps) {
    testing::TempDir copy;
    std::filesystem::copy(file(), copy.path() / "state.tfv");
    int opened = 0;
    expect_opens(copy.path(), opened);
    ASSERT_EQ(opened, steps);
  }
  void expect_opens(const std::filesystem::path& folder, int& steps) {
    StoreOptions options = options_;
    options.volume.folders = {folder};
    options.volume.wrap_backend = {};
    auto store = Store::open(options, layout_);
    ASSERT_TRUE(store.ok()) << store.error().message();
    steps = std::stoi((*store)->progress());
    const Reference reference = run_reference(toy_, layout_, steps, case_.micro_batches);
    for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id) {
      const Chunk& chunk = layout_.chunks()[id];
      const auto words = (*store)->fetch(ExtentKind::hi, id), state = (*store)->fetch(ExtentKind::state, id);
      ASSERT_TRUE(words.ok()) << words.error().message();
      ASSERT_TRUE(state.ok()) << state.error().message();
      ASSERT_EQ(std::memcmp(words.value().data(), &reference.words[chunk.unit][chunk.first], chunk.word_bytes()), 0);
      ASSERT_EQ(std::memcmp(state.value().data(), &reference.state[chunk.unit][chunk.first], chunk.elements), 0);
    }
  }

  void compare(const Reference& reference, bool& equal) {
    ASSERT_OK(device_->synchronize(device_->record(StreamId::compute)));
    equal = results_ == reference.results;
    for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id) {
      const Chunk& chunk = layout_.chunks()[id];
      ASSERT_OK(executor_->access(ExtentKind::hi, id, false, [&](std::span<std::byte> bytes) {
        equal = equal && std::memcmp(bytes.data(), &reference.words[chunk.unit][chunk.first], bytes.size()) == 0;
      }));
      ASSERT_OK(executor_->access(ExtentKind::state, id, false, [&](std::span<std::byte> bytes) {
        equal = equal && std::memcmp(bytes.data(), &reference.state[chunk.unit][chunk.first], chunk.elements) == 0;
      }));
    }
  }

  int deferred_chunks() const {
    return static_cast<int>(std::count(arrangement_.deferred.begin(), arrangement_.deferred.end(), true));
  }
  const Layout& layout() const { return layout_; }
  const Arrangement& arrangement() const { return arrangement_; }
  ToyWork& work() { return *work_; }
  LaneCounters lane(Lane lane) const { return executor_->counters()[static_cast<std::size_t>(lane)]; }
  Store& store() { return *store_; }
  std::filesystem::path file() const { return folder_.path() / "state.tfv"; }
  std::function<void(Plan&)> mutate;
  int swapped = 0;     // visits with activations in a slot
  int most_ahead = 0;  // visits that were left and not computed

 private:
  static bool HasFatalFailure() { return ::testing::Test::HasFatalFailure(); }

  void visits(int step) {
    const int stages = static_cast<int>(layout_.stages().size());
    carry_.assign(case_.micro_batches, 0);
    inputs_.assign(stages, std::vector<std::uint64_t>(case_.micro_batches));
    for (int micro_batch = 0; micro_batch < case_.micro_batches; ++micro_batch)
      carry_[micro_batch] = step * 100 + micro_batch;
    for (int order = 0; order < 2 * stages - 1; ++order) {
      const int stage = order < stages ? order : 2 * stages - 2 - order;
      const Pass pass = order < stages - 1 ? Pass::forward : order == stages - 1 ? Pass::head : Pass::backward;
      for (int micro_batch = 0; micro_batch < case_.micro_batches; ++micro_batch) {
        auto entered = executor_->enter(stage, pass, micro_batch);
        ASSERT_TRUE(entered.ok()) << entered.error().message();
        swapped += entered->slot != nullptr && entered->activations == Activations::swap ? 1 : 0;
        // The host runs ahead: the visit may be gone when the stream comes to it.
        compute_on(*device_, StreamId::compute,
                   [this, stage, pass, micro_batch, visit = *entered->visit, arena = entered->arena,
                    item = entered->item, slot = entered->slot] {
                     compute(stage, pass, micro_batch, visit, arena, item, slot);
                     ++computed_;
                   });
        ASSERT_OK(executor_->leave());
        most_ahead = std::max(most_ahead, ++enqueued_ - computed_);
      }
    }
    ASSERT_OK(device_->synchronize(device_->record(StreamId::compute)));
  }

  void compute(int stage, Pass pass, int micro_batch, const Visit& visit, std::byte* arena, const Item* item,
               std::byte* swap_slot) {
    const auto& units = layout_.stages()[stage].units;
    if (pass == Pass::forward) inputs_[stage][micro_batch] = carry_[micro_batch];
    if (swap_slot != nullptr) {
      // All of it a function of the item: what comes back from another item, or in part, shows as a difference.
      const std::uint64_t bytes = item->bytes();
      auto* slot = reinterpret_cast<std::uint64_t*>(swap_slot);
      std::uint64_t value = mix(inputs_[stage][micro_batch], stage);
      for (std::uint64_t i = 0; i < bytes / 8; ++i) {
        value = mix(value, i);
        if (pass == Pass::backward && slot[i] != value) results_.push_back(0);
        slot[i] = pass == Pass::forward ? value : 0;
      }
    }
    if (case_.pause.count() != 0) std::this_thread::sleep_for(case_.pause);
    for (std::size_t u = 0; u < units.size(); ++u) {
      const std::uint64_t n = layout_.unit_elements(units[u]);
      const std::uint64_t at = visit.weights[u];
      const auto* words = at == kNowhere ? nullptr : reinterpret_cast<const std::uint16_t*>(arena + at);
      if (pass != Pass::backward) carry_[micro_batch] = toy_forward(carry_[micro_batch], {words, n});
      if (pass == Pass::forward) continue;
      auto* gradient = reinterpret_cast<float*>(arena + visit.gradients[u]);
      if (micro_batch == 0 && visit.fresh_gradient[u]) std::memset(gradient, 0, 4 * n);
      for (std::uint64_t i = 0; i < n; ++i) gradient[i] += toy_gradient(stage == 0 ? 1 : words[i], stage, micro_batch);
    }
    if (pass == Pass::head) results_.push_back(carry_[micro_batch]);
  }

  const Toy toy_;
  const Case case_;
  Layout layout_;
  StoreOptions options_;
  int committed_ = 0;  // steps
  Arrangement arrangement_;
  testing::TempDir folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::shared_ptr<ToyWork> work_ = std::make_shared<ToyWork>();
  std::vector<std::uint64_t> results_, carry_;
  std::vector<std::vector<std::uint64_t>> inputs_;
  bool pending_ = false;
  int enqueued_ = 0;
  std::atomic<int> computed_ = 0;
};

inline constexpr std::uint64_t kMiB = 1 << 20;

inline bool equals_plain_loop(const Case& with, int blocks, int steps, std::function<void(Plan&)> mutate = {}) {
  const Toy toy = make_toy(with.tied, blocks);
  Run run(toy, with);
  run.prepare();
  if (::testing::Test::HasFatalFailure()) return false;
  run.mutate = std::move(mutate);
  run.train(steps);
  if (::testing::Test::HasFatalFailure()) return false;
  const int chunks = static_cast<int>(run.layout().chunks().size());
  EXPECT_EQ(run.work().updated, chunks * steps);
  EXPECT_EQ(run.work().measured, run.deferred_chunks() * steps);
  EXPECT_EQ(run.work().found > 0, run.arrangement().measured_bytes != 0);
  EXPECT_EQ(run.work().found_otherwise, 0);
  if (with.device >= 7 * kMiB) {
    EXPECT_EQ(run.arrangement().device_resident != 0, with.keeps_state);
  }
  if (with.on_device > 0 && with.device >= 8 * kMiB) {
    EXPECT_GT(run.work().on_device, 0);
  }
  if (with.staged) {
    EXPECT_EQ(run.deferred_chunks(), chunks);
  } else {
    EXPECT_NEAR(run.deferred_chunks(), with.deferred * chunks, 0.15 * chunks);
  }
  bool equal = false;
  run.compare(run_reference(toy, run.layout(), steps, with.micro_batches, with.zeros), equal);
  std::uint64_t zeros = 0;
  for (int unit = 0; with.zeros && unit < static_cast<int>(toy.units.size()); ++unit)
    for (std::uint64_t i = 0; i < run.layout().unit_elements(unit); ++i) zeros += is_zero(unit, i) ? 1 : 0;
  EXPECT_EQ(run.lane(Lane::download).left_out, word_bytes(zeros) * static_cast<std::uint64_t>(steps));
  std::uint64_t stored = 0;  // of what is staged beside RAM, the chunks that are zeros alone
  for (const Chunk& chunk : run.layout().chunks())
    if (with.zeros && chunk.unit == 1 && run.arrangement().deferred[chunk.id] &&
        !run.arrangement().gradient_resident[chunk.id])
      stored += chunk.word_bytes();
  for (const Lane lane : {Lane::disk_write, Lane::disk_read})
    EXPECT_EQ(run.lane(lane).left_out, stored * static_cast<std::uint64_t>(steps));
  EXPECT_GE(run.swapped, with.fewest_swapped);
  return equal;
}

}  // namespace tierflow::swap::toy
