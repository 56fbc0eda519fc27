// Of a token table that steps use in parts: which of its chunks a step's tokens use, which have missed updates, and
// what that saves.
#include <algorithm>
#include <set>

#include "runtime/base/mix_bits.h"
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

// No chunk goes longer without its updates: so many learning rates are remembered at most, and what is replayed at once
// stays bounded.
constexpr std::int64_t kMostMissed = 1024;

}  // namespace

MissedUpdates Session::Impl::nothing_missed() const {
  return {*plan.layout,
          {.beta1 = static_cast<float>(adamw.beta1),
           .beta2 = static_cast<float>(adamw.beta2),
           .eps = static_cast<float>(adamw.eps),
           .weight_decay = static_cast<float>(adamw.weight_decay),
           .seed = mix_bits(options.seed)},
          updates_done};
}

// By chunk; empty where none is sparse. rows: how many rows of the table the tokens are.
std::vector<bool> Session::Impl::chunks_of_tokens(const std::vector<MicroBatch>& batches, std::int64_t& rows) const {
  const swap::Layout& layout = *plan.layout;
  if (layout.sparse_chunks().empty()) return {};
  std::set<std::int64_t> tokens;
  for (const MicroBatch& batch : batches) {
    const torch::Tensor ids = batch.ids.to(torch::kCPU).contiguous();
    const auto* first = ids.const_data_ptr<std::int64_t>();
    tokens.insert(first, first + ids.numel());
  }
  rows = static_cast<std::int64_t>(tokens.size());
  std::vector<bool> used(layout.chunks().size(), false);
  for (const TokenTable& table : token_tables(model->spec())) {
    const std::vector<PackedTensor>& tensors = plan.packed.units[table.unit].tensors;
    const std::uint64_t offset = std::ranges::find(tensors, table.tensor, &PackedTensor::tensor)->offset;
    const std::span<const swap::Chunk> chunks = layout.chunks_of(table.unit);
    for (auto token = tokens.lower_bound(table.first_row);
         token != tokens.end() && *token < table.first_row + table.rows; ++token) {
      const std::uint64_t begin = offset + static_cast<std::uint64_t>((*token - table.first_row) * table.columns),
                          end = begin + static_cast<std::uint64_t>(table.columns);
      for (auto at = std::ranges::partition_point(
               chunks, [&](const swap::Chunk& chunk) { return chunk.first + chunk.elements <= begin; });
           at != chunks.end() && at->first < end; ++at)
        used[at->id] = true;
    }
    // What else lies among the chunks, such as a table of positions, is used by every step.
    for (const swap::Chunk& chunk : chunks)
      for (const TensorPiece& piece : pieces_of(plan.packed, chunk))
        if (piece.tensor->tensor != table.tensor) used[chunk.id] = true;
  }
  return used;
}

// The sparse chunks of the next plan. In it every chunk catches up that the plan uses; if `all`, every chunk of the
// table. From here on that counts as done.
swap::SparseChunks Session::Impl::take_sparse_chunks(const std::vector<bool>& used, bool all) {
  const swap::Layout& layout = *plan.layout;
  if (layout.sparse_chunks().empty()) return {};
  const std::vector<bool> none(layout.chunks().size(), false);
  swap::SparseChunks sparse{.used = used.empty() ? none : used, .missed = none, .waiting = sparse_waiting};
  for (const int chunk : layout.sparse_chunks()) {
    const bool waits = sparse_waiting[chunk];
    sparse.missed[chunk] = !waits && missed->missed(chunk) &&
                           (all || sparse.used[chunk] || missed->count(chunk) + chunk % kMostMissed / 2 >= kMostMissed);
    if (waits || sparse.missed[chunk]) missed->apply(chunk);
  }
  sparse_waiting = none;
  return sparse;
}

// A step's own updates are done, or deferred.
void Session::Impl::add_update(const std::vector<bool>& used, bool speculated, double lr) {
  missed->add(static_cast<float>(lr));
  for (const int chunk : plan.layout->sparse_chunks()) {
    if (!used[chunk]) continue;
    if (plan.arrangement.deferred[chunk] && !speculated)
      sparse_waiting[chunk] = true;
    else
      missed->apply(chunk);
  }
}

std::uint64_t Session::Impl::sparse_parameters(const std::function<bool(int chunk)>& these) const {
  std::uint64_t sum = 0;
  for (const int id : plan.layout->sparse_chunks())
    if (these(id)) sum += parameters_in(plan.packed, plan.layout->chunks()[id]);
  return sum;
}

// Every parameter whose update the step before deferred has it now, and so many chunks what they had missed.
void Session::Impl::check_deferred(const OptimizerWork& work, std::uint64_t behind) const {
  if (work.caught_up() != behind)
    throw Exception(io::ErrorKind::numeric, std::to_string(work.caught_up()) + " of " + std::to_string(behind) +
                                                " parts of the embedding caught up with what they had missed");
  const std::uint64_t due = work.due_deferred();
  if (work.updated_deferred() != due)
    throw Exception(io::ErrorKind::numeric, "the step before updated " + std::to_string(work.updated_deferred()) +
                                                " of " + std::to_string(due) + " parameters that waited for it");
}

// Between storage and RAM, beside the commits.
void Session::Impl::count_row_bytes(const swap::Plan& step, StepResult& result) const {
  const swap::Layout& layout = *plan.layout;
  if (layout.sparse_chunks().empty()) return;
  const auto stored = [&](const swap::Task& task) {
    using Where = swap::HostRef::Where;
    return (task.lane == swap::Lane::disk_read || task.lane == swap::Lane::disk_write) && task.chunk >= 0 &&
           layout.chunks()[task.chunk].sparse &&
           (task.words.where == Where::word_buffer || task.state.where == Where::state_buffer ||
            task.gradient.where == Where::word_buffer);
  };
  for (const swap::Task& task : step.tasks)
    if (stored(task)) result.embedding_bytes += task.bytes;
  // As if every chunk were used: what is deferred is read once, else words are read forward and backward.
  for (const int id : layout.sparse_chunks()) {
    const swap::Chunk& chunk = layout.chunks()[id];
    const bool deferred = plan.arrangement.deferred[id] && result.clipping == Clipping::staged;
    if (!plan.arrangement.hi_resident[id]) result.embedding_bytes_of_all += (deferred ? 2 : 3) * chunk.word_bytes();
    if (!plan.arrangement.state_resident[id]) result.embedding_bytes_of_all += 2 * chunk.state_bytes;
    if (deferred && !plan.arrangement.gradient_resident[id]) result.embedding_bytes_of_all += 2 * chunk.word_bytes();
  }
}

}  // namespace tierflow
