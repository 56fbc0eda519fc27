#pragma once
// Emits tasks in the order of a correct sequential program: those that move extents between storage, host and device,
// and those that update them. It knows where each extent lives, and takes streaming buffers round robin. The caller
// decides when a task is emitted. Deterministic: the same calls give the same tasks.
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "swap/arrangement.h"
#include "swap/hazards.h"
#include "swap/layout.h"
#include "swap/plan.h"

namespace tierflow::swap {

class TaskEmitter {
 public:
  // A gradient on the host: bf16, or with low words the high words of an fp32 sum.
  struct Gradient {
    HostRef high, low;
  };

  // Both outlive the emitter.
  TaskEmitter(const Layout& layout, const Arrangement& arrangement);

  // The tasks that were emitted since the last call, each with the tasks that it waits for, and the visits of the
  // compute tasks.
  Plan take();
  // From now on what is emitted is handed over in parts of some tasks, and take() returns only the rest. The memory of
  // a part is used again for the next one.
  using TakePart = std::function<void(const Plan& part)>;
  void stream_parts_to(TakePart take) { take_part_ = std::move(take); }
  // Tasks from here on serve a visit of this pass and stage.
  void serve(Pass pass, int stage);
  void serve(Pass pass) { pass_ = pass; }

  Task& emit(TaskKind kind, Lane lane, std::initializer_list<Access> accesses);
  // The computation of one micro-batch in the visit; the first one begins the visit. slot: the device slot of what is
  // saved for the item.
  Task& compute(const Visit& visit, int micro_batch, std::uint64_t slot = kNowhere, std::uint64_t slot_bytes = 0);
  // The next streaming buffer of a kind.
  HostRef take_buffer(HostRef::Where where);

  // The following functions work on extents of a chunk, so not on activations.

  // Reads the extent from storage into `to`, which has room for it, and returns `to`.
  HostRef read_into(ExtentKind kind, int chunk, HostRef to);
  // The extent's resident place, or a buffer to fill.
  HostRef place(ExtentKind kind, int chunk);
  // The same place or buffer, with the extent's bytes in it.
  HostRef read(ExtentKind kind, int chunk);
  Gradient read_gradient(int chunk, bool is_sum);
  // Reads the bytes of an extent that stays in RAM or on the device from storage into its place; does nothing for any
  // other extent.
  void read_back(ExtentKind kind, int chunk);
  // Writes the extent to storage; one that is resident in RAM only with Resident::is_written. follows_readers: the
  // write also waits for tasks that read `from`.
  enum class Resident { stays, is_written };
  void write(ExtentKind kind, int chunk, HostRef from, bool follows_readers = false,
             Resident resident = Resident::stays);
  // Copies between the host and an offset in the device arena. A gradient becomes bf16 on its way to the host.
  Task& upload(ExtentKind kind, int chunk, HostRef from, std::uint64_t to);
  Task& download(ExtentKind kind, int chunk, std::uint64_t from, HostRef to);

  // An fp32 gradient leaves the device, is measured, and waits on the host or on storage for its update. If its place
  // is on the device, it is measured there and waits there.
  void take_gradient(int chunk, std::uint64_t from);
  // An fp32 gradient leaves the device and is added to the sum that waits. first_sum: that sum is still one bf16
  // gradient.
  void accumulate(int chunk, std::uint64_t from, bool first_sum);
  // The update on the host, of words that are there. Words and state go back to storage. measures: as in Task.
  void update(int chunk, HostRef words, Gradient gradient, bool measures = false);
  // The updates that a sparse chunk has missed, on the host, of words that are there. Words and state go back to
  // storage.
  void catch_up(int chunk, HostRef words);
  // The update on the device, of words at `words_at`. They then go to `home`, and on to storage. `sum` as in Task.
  // State and gradient move only if they do not stay on the device.
  void update_on_device(int chunk, std::uint64_t words_at, std::uint64_t sum, HostRef home);
  // The stored words and state of every trainable chunk become a durable generation. What stays in RAM or on the device
  // is written first, because all of it has changed since the commit before.
  void commit();

 private:
  Task& fill_in(Task& task, ExtentKind kind, int chunk, HostRef place) const;
  std::uint64_t next_update_slot();

  const Layout& layout_;
  const Arrangement& arrangement_;
  HazardTracker hazards_;
  TaskId next_id_ = 0;
  TakePart take_part_;  // empty: a plan is one whole
  std::vector<Visit> visits_;
  std::vector<Task> tasks_;  // emitted_ of them, then former ones
  std::size_t emitted_ = 0;
  Pass pass_ = Pass::forward;
  int stage_ = -1;
  int next_word_ = 0, next_state_ = 0, next_activation_ = 0, next_update_slot_ = 0;
};

}  // namespace tierflow::swap
