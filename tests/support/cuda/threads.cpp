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
};

struct Warp {
  // Two, as fast lanes may give for the next exchange while slow ones still read.
  std::array<std::array<std::uint64_t, kWarp>, 2> given{};
  unsigned exchanges = 0;  // that are complete
};

// Stacks are kept from block to block.
struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
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

// Until each thread of the warp has ended, or waits for threads of other warps or for lanes that do not come.
void run_warp(Block& of, unsigned warp, unsigned count) {
  const unsigned first = warp * kWarp, end = std::min(first + kWarp, count);
  for (;;) {
    for (unsigned i = first; i < end; ++i)
      if (of.threads[i].state == State::ready) of.run(i);
    if (end - first != kWarp || !all_are(of, first, end, State::at_exchange)) return;
    ++of.warps[warp].exchanges;
    set(of, first, end, State::ready);
  }
}

}  // namespace

std::string run_block(const std::function<void()>& kernel, unsigned count) {
  Block& of = block();
  if (of.threads.size() < count) of.threads.resize(count);
  of.warps.assign((count + kWarp - 1) / kWarp, {});
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
  const unsigned warps = static_cast<unsigned>(of.warps.size());
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

const std::array<std::uint64_t, 32>& exchange(std::uint64_t value) {
  Block& of = block();
  Warp& warp = of.warps[of.running / kWarp];
  const unsigned turn = warp.exchanges % 2;
  warp.given[turn][of.running % kWarp] = value;
  of.leave(State::at_exchange);
  return warp.given[turn];
}

}  // namespace tierflow::testing::cuda
