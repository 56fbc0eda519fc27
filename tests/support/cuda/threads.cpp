#include "tests/support/cuda/threads.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/support/cuda/cuda_runtime.h"

namespace tierflow::testing::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = 128 << 10;

enum class State { ready, at_barrier, at_exchange, ended };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::ready;
  unsigned lanes = 0;                           // of its exchange
  std::uint64_t gives = 0;                      // to it
  std::array<std::uint64_t, kWarp> given = {};  // by those lanes, in its last one
};

// Stacks are kept from block to block.
struct Block {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  const std::function<void()>* kernel = nullptr;
  unsigned running = 0;

  void run(unsigned thread) {
    running = thread;
    threadIdx.x = thread;
    swapcontext(&scheduler, &threads[thread].context);
  }
  void leave(State state) {
    Thread& own = threads[running];
    own.state = state;
    swapcontext(&own.context, &scheduler);
  }
};

Block& block() {
  static thread_local Block only;
  return only;
}

void begin_thread() {
  (*block().kernel)();
  block().threads[block().running].state = State::ended;
}

// Whether all of [first, end) are in the state.
bool all_are(const Block& of, unsigned first, unsigned end, State state) {
  for (unsigned i = first; i < end; ++i)
    if (of.threads[i].state != state) return false;
  return true;
}

void set(Block& of, unsigned first, unsigned end, State state) {
  for (unsigned i = first; i < end; ++i) of.threads[i].state = state;
}

// Whether the exchange of a thread, whose warp begins at `first`, has all the lanes that it names.
bool is_complete(const Block& of, unsigned first, unsigned thread) {
  const unsigned lanes = of.threads[thread].lanes;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1U) == 0) continue;
    const Thread& other = of.threads[first + lane];
    if (other.state != State::at_exchange || other.lanes != lanes) return false;
  }
  return (lanes >> (thread - first) & 1U) != 0;
}

// What is complete of the warp's exchanges ends.
bool exchange_in_warp(Block& of, unsigned first) {
  bool any = false;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (of.threads[first + lane].state != State::at_exchange || !is_complete(of, first, first + lane)) continue;
    any = true;
    const unsigned lanes = of.threads[first + lane].lanes;
    std::array<std::uint64_t, kWarp> given;
    given.fill(~std::uint64_t{0});  // undefined, of other lanes
    for (unsigned i = 0; i < kWarp; ++i)
      if ((lanes >> i & 1U) != 0) given[i] = of.threads[first + i].gives;
    for (unsigned i = 0; i < kWarp; ++i) {
      if ((lanes >> i & 1U) == 0) continue;
      of.threads[first + i].given = given;
      of.threads[first + i].state = State::ready;
    }
  }
  return any;
}

// Until each thread of the warp has ended, or waits for threads of other warps or for lanes that do not come.
void run_warp(Block& of, unsigned warp, unsigned count) {
  const unsigned first = warp * kWarp, end = std::min(first + kWarp, count);
  for (;;) {
    for (unsigned i = first; i < end; ++i)
      if (of.threads[i].state == State::ready) of.run(i);
    if (end - first != kWarp || !exchange_in_warp(of, first)) return;
  }
}

}  // namespace

std::string run_block(const std::function<void()>& kernel, unsigned count) {
  Block& of = block();
  if (of.threads.size() < count) of.threads.resize(count);
  of.kernel = &kernel;
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = of.threads[i];
    if (thread.stack == nullptr) thread.stack = std::make_unique<char[]>(kStack);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &of.scheduler;
    thread.state = State::ready;
    makecontext(&thread.context, begin_thread, 0);
  }
  // A warp goes as far as it can before another does, by turns the first and the last one ahead: what lacks a barrier
  // is overtaken.
  const unsigned warps = (count + kWarp - 1) / kWarp;
  for (unsigned round = 0; !all_are(of, 0, count, State::ended); ++round) {
    for (unsigned i = 0; i < warps; ++i) run_warp(of, (round % 2 == 0 ? i : warps - 1 - i), count);
    if (all_are(of, 0, count, State::at_barrier))
      set(of, 0, count, State::ready);
    else if (!all_are(of, 0, count, State::ended))
      return "threads of a block wait for others that do not come";
  }
  return {};
}

void wait_for_block() {
  block().leave(State::at_barrier);
}

const std::array<std::uint64_t, 32>& exchange(std::uint64_t value, unsigned lanes) {
  Block& of = block();
  Thread& own = of.threads[of.running];
  own.gives = value;
  own.lanes = lanes;
  of.leave(State::at_exchange);
  return own.given;
}

}  // namespace tierflow::testing::cuda
