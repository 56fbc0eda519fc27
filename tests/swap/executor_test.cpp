// A toy model without torch: integers stand for weights and activations, so that a sequential loop gives the expected
// bits. The same plans, stores, streams and buffers as a real run carry it.
#include "swap/executor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "swap/arrange.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/power_cut.h"
#include "tests/swap/devices_under_test.h"

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kCarryBytes = 4096;

float toy_gradient(std::uint16_t word, int stage, int micro_batch) {
  return static_cast<float>((word & 0x3fU) + 2 * stage + micro_batch);
}
std::uint16_t to_bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}  // small integers: exact
std::uint16_t initial_word(int unit, std::uint64_t i) {
  return static_cast<std::uint16_t>((unit * 7919 + i * 31) & 0x7fff);
}
std::byte initial_state(int unit, std::uint64_t i) {
  return static_cast<std::byte>((unit * 13 + i * 7) & 0xff);
}
void toy_update(std::uint16_t& word, std::uint16_t gradient, std::byte& state) {
  state = static_cast<std::byte>(static_cast<unsigned>(state) * 5 + (gradient & 0xffU));
  word = static_cast<std::uint16_t>((word * 3 + gradient + static_cast<unsigned>(state)) & 0x7fff);
}

struct Toy {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  std::uint64_t chunk_elements = kChunkQuantum;
};

Toy make_toy(bool tied, int blocks) {
  Toy toy;
  const auto unit = [&](const char* name, std::uint64_t matrix, std::uint64_t norms) {
    toy.units.push_back(
        {.name = name,
         .groups = {{.elements = matrix, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"},
                    {.elements = norms, .state_bytes_element = 10, .state_bytes_block = 0, .precision = "b"}}});
  };
  unit("embedding", 150 * 1024, 2048);
  toy.stages.push_back({.units = {0}, .backward_needs_weights = false});
  for (int block = 0; block < blocks; ++block) {
    unit("block", 180 * 1024 + 2048 * block, 4096);
    toy.stages.push_back({.units = {1 + block}, .carry_bytes = kCarryBytes});
  }
  unit("head", tied ? 2048 : 140 * 1024, 2048);
  toy.stages.push_back({.units = {1 + blocks}, .carry_bytes = kCarryBytes});
  if (tied) toy.stages.back().units.push_back(0);
  return toy;
}

// The expected result, by the plain loop: one unit's state byte an element stands for all of its state.
struct Reference {
  std::vector<std::vector<std::uint16_t>> words;
  std::vector<std::vector<std::byte>> state;
  std::vector<std::uint64_t> results;  // of each step and micro-batch
};

std::uint64_t mix(std::uint64_t value, std::uint64_t more) {
  return (value ^ more) * 0x9E3779B97F4A7C15ULL + (value >> 29);
}

std::uint64_t toy_forward(std::uint64_t carry, std::span<const std::uint16_t> words) {
  for (std::size_t i = 0; i < words.size(); i += 97) carry = mix(carry, words[i]);
  return mix(carry, words.back());
}

Reference run_reference(const Toy& toy, const Layout& layout, int steps, int micro_batches) {
  Reference reference;
  for (int unit = 0; unit < static_cast<int>(toy.units.size()); ++unit) {
    reference.words.emplace_back(layout.unit_elements(unit));
    reference.state.emplace_back(layout.unit_elements(unit));
    for (std::uint64_t i = 0; i < layout.unit_elements(unit); ++i) {
      reference.words[unit][i] = initial_word(unit, i);
      reference.state[unit][i] = initial_state(unit, i);
    }
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> gradients;
    for (const auto& words : reference.words) gradients.emplace_back(words.size(), 0.0F);
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      std::uint64_t carry = step * 100 + micro_batch;
      for (int stage = 0; stage < static_cast<int>(toy.stages.size()); ++stage)
        for (int unit : toy.stages[stage].units) {
          carry = toy_forward(carry, reference.words[unit]);
          for (std::size_t i = 0; i < gradients[unit].size(); ++i) {
            const bool embedding_backward = stage == 0;  // has no weights at hand
            gradients[unit][i] += toy_gradient(embedding_backward ? 1 : reference.words[unit][i], stage, micro_batch);
          }
        }
      reference.results.push_back(carry);
    }
    for (std::size_t unit = 0; unit < gradients.size(); ++unit)
      for (std::size_t i = 0; i < gradients[unit].size(); ++i)
        toy_update(reference.words[unit][i], to_bf16(gradients[unit][i]), reference.state[unit][i]);
  }
  return reference;
}

class ToyWork final : public HostWork {
 public:
  io::Error measure(const Chunk&, std::span<const std::byte>) override {
    ++measured;
    return {};
  }
  io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override {
    auto* word = reinterpret_cast<std::uint16_t*>(words.data());
    const auto* grad = reinterpret_cast<const std::uint16_t*>(gradient.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) toy_update(word[i], grad[i], state[i]);
    ++updated;
    return {};
  }
  io::Error update_on_device(const Chunk& chunk, Device& device, const DeviceUpdate& at) override {
    if (at.sum != nullptr) device.round_gradient(StreamId::update, at.gradient, at.sum, chunk.elements);
    compute_on(device, StreamId::update, [n = chunk.elements, at] {
      for (std::uint64_t i = 0; i < n; ++i) toy_update(at.words[i], at.gradient[i], at.state[i]);
    });
    ++updated;
    ++on_device;
    return device.synchronize(device.record(StreamId::update));
  }
  std::string progress() const override {
    if (before_commit) before_commit();
    return std::to_string(after_steps >= 0 ? after_steps : ++commits);
  }
  int after_steps = -1;  // that what is committed is the state of; -1: of one more each time
  int measured = 0, updated = 0, on_device = 0;
  mutable int commits = 0;  // each step's, as a task of the next one
  std::function<void()> before_commit;
};

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
  std::optional<StreamId> deaf;  // a stream of the device that waits for nothing
};

class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::current_path() /
              ("swap-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter()++))) {
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  static int& counter() {
    static int count = 0;
    return count;
  }
  std::filesystem::path path_;
};

#define ASSERT_OK(expression)                 \
  do {                                        \
    const io::Error error_ = (expression);    \
    ASSERT_FALSE(error_) << error_.message(); \
  } while (false)

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
                                         .gradient_slots = case_.rounds_first});
    ASSERT_TRUE(arrangement.ok()) << arrangement.error().message();
    arrangement_ = std::move(arrangement).value();
    ASSERT_LE(arrangement_.host_bytes(layout_), case_.host);
    ASSERT_LE(arrangement_.device_bytes(), case_.device);
    device_ = open_toy_device(case_.chaos, case_.async);
    if (case_.deaf) device_ = std::make_unique<DeafDevice>(std::move(device_), *case_.deaf);
    std::vector<bool> stored_gradients = arrangement_.deferred;
    for (std::size_t id = 0; id < stored_gradients.size(); ++id)
      stored_gradients[id] = stored_gradients[id] && !arrangement_.gradient_resident[id];
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
    TemporaryFolder copy;
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
  Store& store() { return *store_; }
  std::filesystem::path file() const { return folder_.path() / "state.tfv"; }
  std::function<void(Plan&)> mutate;
  int swapped = 0;  // visits with activations in a slot

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
        compute_on(
            *device_, StreamId::compute,
            [this, stage, pass, micro_batch, visit = *entered->visit, arena = entered->arena, item = entered->item,
             slot = entered->slot] { compute(stage, pass, micro_batch, visit, arena, item, slot); });
        ASSERT_OK(executor_->leave());
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
  TemporaryFolder folder_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::shared_ptr<ToyWork> work_ = std::make_shared<ToyWork>();
  std::vector<std::uint64_t> results_, carry_;
  std::vector<std::vector<std::uint64_t>> inputs_;
  bool pending_ = false;
};

constexpr std::uint64_t kMiB = 1 << 20;

bool equals_plain_loop(const Case& with, int blocks, int steps, std::function<void(Plan&)> mutate = {}) {
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
  if (with.on_device > 0 && with.device >= 8 * kMiB) {
    EXPECT_GT(run.work().on_device, 0);
  }
  if (with.staged) {
    EXPECT_EQ(run.deferred_chunks(), chunks);
  } else {
    EXPECT_NEAR(run.deferred_chunks(), with.deferred * chunks, 0.15 * chunks);
  }
  bool equal = false;
  run.compare(run_reference(toy, run.layout(), steps, with.micro_batches), equal);
  EXPECT_GE(run.swapped, with.fewest_swapped);
  return equal;
}

TEST(Executor, EverythingResident) {
  EXPECT_TRUE(equals_plain_loop({.host = 200 * kMiB, .device = 100 * kMiB}, 3, 3));
}
TEST(Executor, EverythingResidentImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = 200 * kMiB, .device = 100 * kMiB, .staged = false}, 3, 3));
}
TEST(Executor, SmallestBudgets) {
  EXPECT_TRUE(equals_plain_loop({.host = 800 * 1024, .device = 1300 * 1024}, 3, 3));
}
TEST(Executor, SmallestBudgetsImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = 800 * 1024, .device = 1300 * 1024, .staged = false}, 3, 3));
}
TEST(Executor, Tied) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 3 * kMiB, .tied = true}, 3, 3));
}
TEST(Executor, TiedImmediate) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 3 * kMiB, .staged = false, .tied = true}, 3, 3));
}
TEST(Executor, AShareOfTheUpdatesInTheNextForward) {
  for (const double share : {0.25, 0.5, 1.0})
    for (const bool tied : {false, true}) {
      EXPECT_TRUE(equals_plain_loop(
          {.host = 200 * kMiB, .device = 100 * kMiB, .staged = false, .tied = tied, .deferred = share}, 3, 3));
      EXPECT_TRUE(equals_plain_loop(
          {.host = kMiB, .device = 3 * kMiB, .staged = false, .tied = tied, .deferred = share}, 3, 3));
    }
}
TEST(Executor, UpdatesOnTheDevice) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 200 * kMiB}) {
      Case with{.host = host, .device = 8 * kMiB, .staged = staged, .on_device = 1};
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
      with.tied = true;
      with.on_device = 0.5;
      with.deferred = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
    }
}
// Each step is committed; before each commit a crash leaves the step before.
TEST(Executor, TwoGenerations) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB})
      EXPECT_TRUE(equals_plain_loop({.host = host, .device = 2 * kMiB, .staged = staged, .generations = 2}, 3, 3));
}
TEST(Executor, CommitsBesideTheNextStep) {
  for (const bool staged : {true, false})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB}) {
      Case with{.host = host, .device = 2 * kMiB, .staged = staged, .generations = 2, .commits_beside = true};
      EXPECT_TRUE(equals_plain_loop(with, 3, 4));
      with.chaos = 9;
      if (!staged) with.deferred = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 3, 4));
    }
}

// Whatever stands and whatever is undone: the bits of the plain loop; and what is undone leaves, to a crash as well,
// the state that it began with.
TEST(Executor, SpeculativeSteps) {
  for (const std::string& speculation : {std::string("skuuk"), std::string("uksku")})
    for (const std::uint64_t host : {kMiB, 3 * kMiB, 200 * kMiB})
      for (const std::uint64_t chaos : {0, 9}) {
        const Case with{.host = host,
                        .device = 2 * kMiB,
                        .tied = chaos != 0 && host == kMiB,
                        .chaos = chaos,
                        .generations = 2,
                        .speculation = speculation};
        const Toy toy = make_toy(with.tied, 3);
        class Run run(toy, with);
        run.prepare();
        ASSERT_FALSE(::testing::Test::HasFatalFailure());
        const int steps = static_cast<int>(speculation.size());
        run.train(steps);
        ASSERT_FALSE(::testing::Test::HasFatalFailure());
        bool equal = false;
        run.compare(run_reference(toy, run.layout(), steps, with.micro_batches), equal);
        EXPECT_TRUE(equal) << speculation << " " << host << " " << chaos;
      }
}
TEST(Executor, SpeculativeStepsWithUpdatesOnTheDevice) {
  for (const double share : {0.5, 1.0}) {
    const Case with{.host = 3 * kMiB,
                    .device = 8 * kMiB,
                    .chaos = 5,
                    .generations = 2,
                    .speculation = "skusku",
                    .on_device = share};
    const Toy toy = make_toy(false, 3);
    class Run run(toy, with);
    run.prepare();
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    run.train(6);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 6, with.micro_batches), equal);
    EXPECT_TRUE(equal) << share;
  }
}

// While steps and commits overlap, the power goes at every fifth write: what opens is a step's end, bit for bit, and no
// older than the last that was acknowledged.
TEST(Executor, APowerCutLeavesAWholeStep) {
  for (const bool staged : {true, false}) {
    const auto cache = std::make_shared<testing::DriveCache>();
    Case with{.host = kMiB, .device = 2 * kMiB, .staged = staged, .generations = 2, .commits_beside = true};
    with.wrap = testing::caching(cache);
    with.engine = io::EngineKind::threads;
    const Toy toy = make_toy(false, 1);
    class Run run(toy, with);
    run.prepare();
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    const std::vector<char> image = testing::read_file(run.file());
    cache->forget();
    std::vector<std::size_t> acknowledged_at;  // writes so far, by commit
    run.work().before_commit = [&] {
      std::lock_guard lock(cache->mutex);
      acknowledged_at.push_back(cache->writes.size());  // of the commit before
    };
    run.train(4);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    ASSERT_EQ(acknowledged_at.size(), 3U);
    acknowledged_at.erase(acknowledged_at.begin());
    TemporaryFolder cut;
    std::map<int, int> opened;
    testing::for_each_cut(
        *cache, image, cut.path(),
        [&](std::size_t cut_at, const std::string& where) {
          SCOPED_TRACE(where);
          const auto acknowledged = std::count_if(acknowledged_at.begin(), acknowledged_at.end(),
                                                  [&](std::size_t at) { return at < cut_at; });
          if (acknowledged == 0) return;
          int steps = 0;
          run.expect_opens(cut.path(), steps);
          EXPECT_GE(steps, acknowledged);
          ++opened[steps];
        },
        5);
    EXPECT_GT(opened[1], 3);
    EXPECT_GT(opened[2], 3);
    EXPECT_GT(opened[3], 0);
  }
}
TEST(Executor, ThreadsEngine) {
  EXPECT_TRUE(equals_plain_loop({.host = kMiB, .device = 2 * kMiB, .engine = io::EngineKind::threads}, 3, 3));
}

TEST(Executor, ActivationsGoToTheHostAndToStorage) {
  for (const bool staged : {true, false}) {
    Case with{.host = 2 * kMiB, .device = 4 * kMiB, .staged = staged, .swap_to_host = 3, .swap_to_storage = 3};
    with.fewest_swapped = 6 * 2 * 3;  // items, there and back, in each step
    EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    with.swap_to_host = 0;
    with.swap_to_storage = 8;
    with.chaos = 3;
    with.fewest_swapped = 8 * 2 * 3;
    EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    with = {.host = 200 * kMiB, .device = 100 * kMiB, .staged = staged, .swap_to_host = 6, .fewest_swapped = 6 * 2 * 3};
    EXPECT_TRUE(equals_plain_loop(with, 3, 3));
  }
}
TEST(Executor, GradientsAreRoundedInSlotsOfTheDevice) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false}) {
      Case with{.host = 1200 * 1024, .device = 4 * kMiB, .staged = staged, .chaos = chaos, .rounds_first = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.async = true;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.device = 1300 * 1024;  // no room for slots
      EXPECT_TRUE(equals_plain_loop(with, 3, 3));
      with = {.host = 200 * kMiB, .device = 100 * kMiB, .staged = staged, .chaos = chaos, .rounds_first = true};
      with.on_device = 0.5;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    }
}
// As on a GPU: the client leaves each computation long before it is done.
TEST(Executor, TheHostRunsAhead) {
  for (const std::uint64_t chaos : {0, 4})
    for (const bool staged : {true, false}) {
      Case with{.host = 1200 * 1024, .device = 3 * kMiB, .staged = staged, .chaos = chaos, .async = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with.tied = true;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with = {.host = kMiB, .device = 8 * kMiB, .staged = staged, .chaos = chaos, .on_device = 1, .async = true};
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
      with = {.host = 2 * kMiB, .device = 4 * kMiB, .staged = staged, .chaos = chaos, .swap_to_host = 3, .async = true};
      with.swap_to_storage = 3;
      with.fewest_swapped = 6 * 2 * 3;
      EXPECT_TRUE(equals_plain_loop(with, 4, 3));
    }
}
TEST(Executor, RandomBudgetsUnderChaos) {
  std::minstd_rand random(20);
  for (int round = 0; round < 40; ++round) {
    const bool tied = random() % 2 == 0;
    const Case with{.host = 900 * 1024 + random() % (4 * kMiB),
                    .device = (tied ? 2500 : 1400) * 1024 + random() % (3 * kMiB),
                    .staged = random() % 2 == 0,
                    .tied = tied,
                    .micro_batches = 1 + static_cast<int>(random() % 3),
                    .chaos = 1 + random() % 1000,
                    .generations = 1 + static_cast<int>(random() % 2),
                    .deferred = static_cast<double>(random() % 5) / 4,
                    .on_device = static_cast<double>(random() % 3) / 2,

                    .swap_to_host = static_cast<int>(random() % 4),
                    .swap_to_storage = static_cast<int>(random() % 4),
                    .async = round % 2 == 1,
                    .rounds_first = round % 4 / 2 == 1};
    ASSERT_TRUE(equals_plain_loop(with, 1 + static_cast<int>(random() % 4), 2))
        << "host " << with.host << " device " << with.device << " staged " << with.staged << " tied " << with.tied
        << " micro-batches " << with.micro_batches << " chaos " << with.chaos << " generations " << with.generations
        << " deferred " << with.deferred << " on the device " << with.on_device << " async " << with.async;
  }
}

// Negative controls: without one kind of wait the chaotic device must show a difference or an error.
void expect_caught(const Case& with, TaskKind waiting, Lane forgets) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the missing wait is a data race, which the sanitizer reports as it should";
#endif
  bool caught = false;
  for (std::uint64_t seed = 1; seed <= 8 && !caught; ++seed) {
    Case chaotic = with;
    chaotic.chaos = seed;
    const Toy toy = make_toy(false, 4);
    Run run(toy, chaotic);
    run.prepare();
    run.mutate = [&](Plan& plan) {
      for (Task& task : plan.tasks) {
        if (task.kind != waiting) continue;
        std::erase_if(task.dependencies,
                      [&](TaskId id) { return id >= plan.first_id && plan.tasks[id - plan.first_id].lane == forgets; });
      }
    };
    run.train(2);
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 2, with.micro_batches), equal);
    caught = !equal;
  }
  EXPECT_TRUE(caught) << task_name(waiting) << " no longer waits for " << lane_name(forgets);
}
const Case kSmall{.host = 1200 * 1024, .device = 3 * kMiB};
TEST(NegativeControl, ComputeWithoutWaitingForUploads) {
  expect_caught(kSmall, TaskKind::compute, Lane::upload);
}
TEST(NegativeControl, GradientTakenBeforeItIsSummed) {
  expect_caught(kSmall, TaskKind::download_gradient, Lane::compute);
}
TEST(NegativeControl, ActivationsSavedBeforeTheyAreComputed) {
  Case with = kSmall;
  with.swap_to_host = 100;
  expect_caught(with, TaskKind::save_activations, Lane::compute);
}
TEST(NegativeControl, ActivationsComputedWithBeforeTheyAreBack) {
  Case with = kSmall;
  with.swap_to_storage = 100;
  expect_caught(with, TaskKind::compute, Lane::upload);
  expect_caught(with, TaskKind::load_activations, Lane::disk_read);
}
TEST(NegativeControl, UploadBeforeTheUpdate) {
  expect_caught(kSmall, TaskKind::upload_hi, Lane::update);
}

const Case kOnDevice{.host = 1200 * 1024, .device = 8 * kMiB, .staged = false, .on_device = 1};
TEST(NegativeControl, DeviceUpdateBeforeItsStateIsThere) {
  expect_caught(kOnDevice, TaskKind::update_on_device, Lane::upload);
}
TEST(NegativeControl, DeviceUpdateBeforeTheGradientIsSummed) {
  Case slow = kOnDevice;  // the state comes before the gradient
  slow.host = 200 * kMiB;
  slow.device = 100 * kMiB;
  slow.pause = std::chrono::milliseconds(10);
  expect_caught(slow, TaskKind::update_on_device, Lane::compute);
}
TEST(NegativeControl, DownloadBeforeTheDeviceUpdate) {
  expect_caught(kOnDevice, TaskKind::download_state, Lane::update);
}

// Where the host runs ahead, a task that followed a computation starts while that is still to come, and only the wait
// for its event on the device holds it back. Without that wait, on one stream, the run must show it.
void expect_noticed(Case with, StreamId deaf) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the missing wait is a data race, which the sanitizer reports as it should";
#endif
  with.deaf = deaf;
  bool noticed = false;
  for (std::uint64_t seed = 1; seed <= 8 && !noticed; ++seed) {
    with.chaos = seed;
    const Toy toy = make_toy(false, 4);
    Run run(toy, with);
    run.prepare();
    EXPECT_EQ(run.arrangement().gradient_slot != 0, with.rounds_first);
    run.train(2);
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 2, with.micro_batches), equal);
    noticed = !equal;
  }
  EXPECT_EQ(noticed, with.async);
}
void expect_noticed_where_the_host_runs_ahead(Case with, StreamId deaf) {
  if (open_toy_device(0, false)->name() == "cpu") expect_noticed(with, deaf);  // not at all
  with.async = true;
  expect_noticed(with, deaf);
}
TEST(NegativeControl, UploadsThatDoNotFollowComputation) {
  Case with = kSmall;  // the device's room for weights comes round
  with.host = 200 * kMiB;
  with.pause = std::chrono::milliseconds(3);
  expect_noticed_where_the_host_runs_ahead(with, StreamId::upload);
}
TEST(NegativeControl, DownloadsThatDoNotFollowComputation) {
  expect_noticed_where_the_host_runs_ahead(kSmall, StreamId::download);
}
TEST(NegativeControl, ActivationsThatAreSavedWithoutFollowingComputation) {
  Case with{.host = 200 * kMiB, .device = 100 * kMiB, .micro_batches = 3, .swap_to_host = 100};
  with.staged = false;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::download);
}
TEST(NegativeControl, RoundingThatDoesNotFollowComputation) {
  Case with = kSmall;
  with.device = 4 * kMiB;
  with.rounds_first = true;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::round);
}
TEST(NegativeControl, CopiesThatDoNotFollowTheRounding) {
  Case with = kSmall;
  with.device = 4 * kMiB;
  with.rounds_first = with.async = true;
  expect_noticed(with, StreamId::download);
}
TEST(NegativeControl, DeviceUpdatesThatDoNotFollowComputation) {
  Case with = kOnDevice;
  with.host = 200 * kMiB;
  with.device = 100 * kMiB;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::update);
}

TEST(Arrange, NamesTheSmallestBudgetThatWorks) {
  const Toy toy = make_toy(false, 3);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  for (const bool staged : {true, false}) {
    ArrangeRequest request{.host_budget = 1, .device_budget = 64 * kMiB, .micro_batches = 2, .staged = staged};
    const auto refused = arrange(layout, request);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().kind, io::ErrorKind::usage);
    EXPECT_NE(refused.error().detail.find("the smallest that works is"), std::string::npos) << refused.error().detail;
    request.device_budget = 1;
    EXPECT_NE(arrange(layout, request).error().detail.find("--device-memory"), std::string::npos);
  }
}

std::vector<Activations> activations_of(const Arrangement& arrangement) {
  std::vector<Activations> by_item;
  for (const Item& item : arrangement.items) by_item.push_back(item.activations);
  return by_item;
}

TEST(Arrange, KeepsTheLastActivationsThatFitAndSwapsThoseBefore) {
  const Toy toy = make_toy(false, 4);
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  const int stages = static_cast<int>(layout.stages().size()), items = 2 * (stages - 1);
  ArrangeRequest request{.host_budget = 64 * kMiB, .device_budget = 64 * kMiB, .micro_batches = 2};
  EXPECT_EQ(activations_of(arrange(layout, request).value()), std::vector<Activations>(items, Activations::recompute));
  request.activation_bytes.assign(stages, kMiB);
  request.activation_bytes.front() = request.activation_bytes.back() = 0;
  request.swapped_bytes.assign(stages, kMiB / 4);
  request.swapped_bytes.front() = request.swapped_bytes.back() = 0;
  std::vector<Activations> all(items, Activations::keep);
  for (const int item : {0, 1}) all[item] = Activations::recompute;
  EXPECT_EQ(activations_of(arrange(layout, request).value()), all);
  request.train = false;
  EXPECT_EQ(activations_of(arrange(layout, request).value()), std::vector<Activations>(items, Activations::recompute));
  request.train = true;
  request.swap_to_host = request.swap_to_storage = 2;
  request.swap_workspace = kMiB;
  std::set<std::ptrdiff_t> kept_counts;
  for (; request.device_budget > kMiB; request.device_budget -= kMiB) {
    const auto arranged = arrange(layout, request);
    if (!arranged.ok()) break;
    const Arrangement& at = arranged.value();
    const std::ptrdiff_t kept = at.count(Activations::keep), swapped = at.count(Activations::swap);
    kept_counts.insert(kept);
    // From the last block's items to the first's: kept, to the host, to storage, computed again.
    for (int item = 2, from_last = items - 3; item < items; ++item, --from_last) {
      const Activations expected = from_last < kept             ? Activations::keep
                                   : from_last < kept + swapped ? Activations::swap
                                                                : Activations::recompute;
      EXPECT_EQ(at.items[item].activations, expected) << item << " of " << kept << " and " << swapped;
      EXPECT_EQ(at.items[item].on_storage, expected == Activations::swap && from_last >= kept + 2) << item;
    }
    EXPECT_TRUE(swapped == std::min<std::ptrdiff_t>(4, items - 2 - kept) || swapped == 0);
    EXPECT_LE(at.device_bytes() + kept * kMiB + (swapped != 0 ? request.swap_workspace : 0), request.device_budget);
    EXPECT_LE(at.host_bytes(layout), request.host_budget);
  }
  EXPECT_GT(kept_counts.size(), 4U);
}

// Inputs that leave the device go on to storage where the host has no room for them.
TEST(Arrange, SavesOnStorageWhatTheHostHasNoRoomFor) {
  Toy toy = make_toy(false, 4);
  for (StageShape& stage : toy.stages)
    if (stage.carry_bytes != 0) stage.carry_bytes = kMiB;
  const Layout layout(toy.units, toy.stages, toy.chunk_elements);
  ArrangeRequest request{.host_budget = 6 * kMiB, .device_budget = 4 * kMiB, .micro_batches = 4};
  const auto on_host = [&](std::uint64_t budget) {
    request.host_budget = budget;
    const auto arranged = arrange(layout, request);
    EXPECT_TRUE(arranged.ok()) << arranged.error().message();
    EXPECT_LE(arranged.value().host_bytes(layout), budget);
    return arranged.value().saved_on_host();
  };
  EXPECT_EQ(on_host(40 * kMiB), 16 * kMiB);
  EXPECT_LT(on_host(12 * kMiB), 12 * kMiB);
  EXPECT_EQ(on_host(2 * kMiB + 512 * 1024), 0U);
  request.storage = false;
  EXPECT_FALSE(arrange(layout, request).ok());
}

}  // namespace
}  // namespace tierflow::swap
