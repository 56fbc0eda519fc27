// A session's passes over the model: each stage entered, computed and left, and what happens where memory runs out.
#include <algorithm>

#include "runtime/base/signals.h"
#include "runtime/models/adapter.h"
#include "runtime/models/upload.h"
#include "runtime/session/session_impl.h"

namespace tierflow {

io::Error out_of_memory_error(const c10::Error& error) {
  return {.kind = io::ErrorKind::memory,
          .operation = "compute",
          .detail = std::string(error.what_without_backtrace()) +
                    "; use a smaller --micro-batch (--batch of `tierflow generate`) or --sequence-length, or a larger "
                    "--device-memory"};
}

namespace {

// Whether the stage's input waits outside the device between its forward and its backward.
bool input_leaves(const swap::Entered& entered) {
  return entered.item != nullptr && entered.item->input_bytes != 0;
}

// Behind the stage's input, where that lies in the slot too.
std::byte* activations_in(const swap::Entered& entered) {
  return entered.slot + entered.item->input_bytes;
}

}  // namespace

// Whether all that computing this visit changes is sums of gradients that it begins with zeros.
bool Session::Impl::starts_afresh(const swap::Entered& entered, int micro_batch) const {
  const swap::Visit& visit = *entered.visit;
  for (std::size_t position = 0; position < visit.gradients.size(); ++position)
    if (visit.gradients[position] != swap::kNowhere && (micro_batch != 0 || !visit.fresh_gradient[position]))
      return false;
  return true;
}

// Runs a visit's computation. Where memory runs out, caches are freed and it runs once more if it can (`repeatable`:
// a second run leaves what a first would have); fragments that kept the first from fitting are gone then.
// Of a pass for first values or a window nothing is computed any more once a signal asks for an end.
void Session::Impl::compute(bool repeatable, const std::function<void()>& work) {
  if (gradient_init != nullptr && stop_signal() != 0) return;
  for (bool again = false; !out_of_memory; again = true) {
    try {
      work();
      return;
    } catch (const c10::Error& error) {
      if (!is_out_of_memory(error)) throw;
      if (again || !repeatable) {
        out_of_memory = out_of_memory_error(error);
        drop_activations();
      } else {
        ++computed_again;
      }
    }
    torch_memory.release_kept();
  }
}

void Session::Impl::drop_activations() {
  carries.assign(carries.size(), {});
  references.assign(references.size(), {});
  inputs.assign(inputs.size(), std::vector<Carry>(carries.size()));
  kept.clear();
  in_slot.clear();
}

// Those of other formats than bf16 are made dense once a visit, for all of its micro-batches.
Weights Session::Impl::weights(const swap::Entered& entered) {
  const int stage = entered.visit->stage;
  const Weights stored = state->weights(entered);
  if (!models::has_stored_weights(model->spec(), stage)) return stored;
  if (dense.empty()) dense = models::dense_weights(model->spec(), stage, stored);
  Weights bound = dense;
  for (std::size_t i = 0; i < bound.size(); ++i)
    if (stored[i].defined() && stored[i].scalar_type() != torch::kUInt8) bound[i] = stored[i];
  return bound;
}

void Session::Impl::regroup(int together, const std::vector<Shared>& shared) {
  if (together == carried_together) return;
  const std::size_t each = static_cast<std::size_t>(std::max(together, carried_together));
  for (std::vector<Carry>* list : {&carries, &references}) {
    if (list->empty()) continue;
    compute(true, [&] {
      std::vector<Carry> now(list->size());
      for (std::size_t first = 0; first < shared.size(); first += each) {
        const std::size_t end = std::min(first + each, shared.size());
        if (together != 1) {
          now[first / each] = joined(
              {list->begin() + static_cast<std::ptrdiff_t>(first), list->begin() + static_cast<std::ptrdiff_t>(end)});
          continue;
        }
        std::vector<torch::Tensor> ids;
        for (std::size_t of = first; of < end; ++of) ids.push_back(shared[of].ids);
        std::ranges::move(apart((*list)[first / each], ids), now.begin() + static_cast<std::ptrdiff_t>(first));
      }
      *list = std::move(now);
    });
  }
  carried_together = together;
}

void Session::Impl::expect_references(std::size_t micro_batches) {
  references.assign(plan.references_too ? micro_batches : 0, {});
}

torch::Tensor Session::Impl::reference_losses(const Weights& bound, int micro_batch, const Shared& shared) {
  const int last = static_cast<int>(plan.layout->stages().size()) - 1;
  const Weights without = models::without_adapters(model->spec(), last, bound);
  return models::download(model->head_scores(without, references[micro_batch], shared).losses);
}

// Every stage but the last, layer-major: all micro-batches pass a stage before the next one.
void Session::Impl::forward_all(const std::vector<Shared>& shared, swap::Pass pass,
                                const std::function<void()>& before_each) {
  const int last = static_cast<int>(plan.layout->stages().size()) - 1;
  const bool train = pass == swap::Pass::forward;
  carries.assign(shared.size(), {});
  carried_together = 1;
  inputs.assign(last, std::vector<Carry>(train ? shared.size() : 0));
  kept.clear();
  in_slot.clear();
  for (Balanced& of : balanced) of.loads = {};
  for (int stage = 0; stage < last; ++stage) {
    const swap::StageShape& shape = plan.layout->stages()[stage];
    const int together = train ? shape.together : 1;
    regroup(together, shared);
    const int computations =
        train ? shape.computations(static_cast<int>(shared.size())) : static_cast<int>(shared.size());
    for (int number = 0; number < computations; ++number) {
      if (before_each) before_each();
      const swap::Entered entered = enter(stage, pass, number);
      const Shared& of_first = shared[number * together];
      Carry& carry = carries[number];
      swap::Activations activations = entered.activations;
      if (train) expect_balance(stage, number, /*backward=*/false);
      compute(true, [&] {
        Saved* slot = entered.slot != nullptr ? &in_slot[{stage, number}] : nullptr;
        if (input_leaves(entered)) {
          slot->input = copy_to_slot(entered.slot, taken_by_backward(model->spec().stages[stage], carry));
        } else if (train && stage > 0 && model->spec().stages[stage].backward_needs_input) {
          inputs[stage][number] = taken_by_backward(model->spec().stages[stage], carry);
        }
        const models::Seeded draws = seeded(stage, number, train);
        // Where what it keeps does not fit after all, a second run does without.
        const swap::Activations these = std::exchange(activations, swap::Activations::recompute);
        if (these == swap::Activations::recompute) {
          carry = model->forward(stage, weights(entered), carry, of_first, train);
          return;
        }
        Carry through = carry;  // a second run starts from the same input
        auto made = model->forward_keeping(stage, weights(entered), through, of_first);
        if (these == swap::Activations::keep)
          kept[{stage, number}] = std::move(made);
        else
          slot->activations = copy_to_slot(activations_in(entered), made->essentials());
        carry = std::move(through);
      });
      if (train) take_balance(stage, number);
      if (!references.empty())
        compute(true, [&] {
          references[number] = model->forward(stage, models::without_adapters(model->spec(), stage, weights(entered)),
                                              references[number], of_first, false);
        });
      leave();
    }
  }
  regroup(1, shared);
}

// First the sums of the rows, forward alone; then the gradient, each row with its factor.
HeadResult Session::Impl::head_of_pairs(const swap::Entered& entered, int micro_batch, const Shared& shared,
                                        const Objective& objective, PairTotals& totals) {
  const Weights bound = weights(entered);
  MicroBatch batch = objective.batches[micro_batch];
  if (!references.empty()) batch.reference = row_log_probabilities(batch, reference_losses(bound, micro_batch, shared));
  torch::Tensor losses = model->head_scores(bound, carries[micro_batch], shared).losses;
  if (!losses.defined()) fail_usage("layers of one's own have no loss of each token: pairs are not trained on");
  losses = models::download(losses);
  totals = pair_totals(options.loss, batch, losses);
  const Gradients gradients = gradients_of(entered, micro_batch);
  HeadResult head = model->head_loss_and_backward(bound, gradients, carries[micro_batch], shared,
                                                  pair_scale(options.loss, batch, losses, objective.pairs));
  gradients.zero_untouched();
  return head;
}

void Session::Impl::read_losses(const std::vector<HeadResult>& heads, StepResult& result) {
  std::vector<torch::Tensor> sums;
  for (const HeadResult& head : heads) {
    sums.push_back(head.loss_sum);
    if (head.ce_sum.defined()) sums.insert(sums.end(), {head.ce_sum, head.kd_sum});
  }
  if (sums.empty()) return;
  const torch::Tensor read = models::download(torch::stack(sums));
  const double* next = read.const_data_ptr<double>();
  for (const HeadResult& head : heads) {
    result.loss += *next++;
    if (!head.ce_sum.defined()) continue;
    result.ce_loss += *next++;
    result.kd_loss += *next++;
  }
}

void Session::Impl::head_all(const std::vector<Shared>& shared, const Objective& objective, StepResult& result,
                             OptimizerWork& work) {
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(objective.targets, 1));
  const int last = static_cast<int>(plan.layout->stages().size()) - 1, count = static_cast<int>(shared.size());
  std::vector<HeadResult> heads;  // whose losses are still on the device
  for (int micro_batch = 0; micro_batch < count; ++micro_batch) {
    const swap::Entered entered = enter(last, swap::Pass::head, micro_batch);
    compute(starts_afresh(entered, micro_batch), [&] {
      const models::Seeded draws = seeded(last, micro_batch);
      if (options.loss.pairs()) {
        PairTotals totals;
        carries[micro_batch] = head_of_pairs(entered, micro_batch, shared[micro_batch], objective, totals).d_carry;
        result.loss += totals.loss + totals.nll;
        if (result.pairs) result.pairs->add(totals);
        if (!references.empty()) references[micro_batch].clear();
        return;
      }
      const Gradients gradients = gradients_of(entered, micro_batch);
      HeadResult head =
          model->head_loss_and_backward(weights(entered), gradients, carries[micro_batch], shared[micro_batch], scale);
      gradients.zero_untouched();
      carries[micro_batch] = std::move(head.d_carry);
      heads.push_back(std::move(head));
    });
    if (micro_batch + 1 == count) {
      // Before the last micro-batch leaves, no update of this step can have begun.
      compute(true, [&] { read_losses(heads, result); });
      result.aux_loss = aux_loss();
      if (out_of_memory || !std::isfinite(result.loss) || !(balanced.empty() || std::isfinite(result.aux_loss)))
        work.skip_updates();
    }
    leave();
  }
}

void Session::Impl::backward_all(const std::vector<Shared>& shared, OptimizerWork& work) {
  for (int stage = static_cast<int>(plan.layout->stages().size()) - 2; stage >= 0; --stage) {
    const swap::StageShape& shape = plan.layout->stages()[stage];
    regroup(shape.together, shared);
    const int computations = shape.computations(static_cast<int>(shared.size()));
    for (int number = 0; number < computations; ++number) {
      const Shared& of_first = shared[number * shape.together];
      const swap::Entered entered = enter(stage, swap::Pass::backward, number);
      expect_balance(stage, number, /*backward=*/true);
      compute(starts_afresh(entered, number), [&] {
        const std::pair item{stage, number};
        const Weights bound = weights(entered);
        const Carry input = input_leaves(entered) ? tensors_in_slot(entered.slot, in_slot.at(item).input, torch_device)
                                                  : inputs[stage][number];
        const models::Seeded draws = seeded(stage, number);
        const Carry& d_out = carries[number];
        // Each is used up by its use: a second run computes it again.
        auto activations = kept.extract(item);
        std::unique_ptr<KeptActivations> made = activations.empty() ? nullptr : std::move(activations.mapped());
        if (const auto found = in_slot.find(item); found != in_slot.end() && !found->second.activations.empty())
          made = model->restore(
              stage, bound, input, of_first,
              tensors_in_slot(activations_in(entered), std::exchange(found->second.activations, {}), torch_device));
        Gradients gradients = gradients_of(entered, number);
        if (gradient_init != nullptr) gradient_init->bind(stage, number, gradients);
        carries[number] = made == nullptr
                              ? model->backward(stage, bound, gradients, input, of_first, d_out)
                              : model->backward_kept(stage, bound, gradients, input, of_first, d_out, std::move(made));
        gradients.zero_untouched();
        inputs[stage][number].clear();
      });
      if (gradient_init != nullptr && number + 1 == computations) compute(true, [&] { gradient_init->take(stage); });
      if (out_of_memory) work.skip_updates();
      leave();
    }
  }
  carries.clear();
}

// Where experts come on demand, the planner of visits expects by itself what followed the last time.
void Session::Impl::evaluate_all(const std::vector<Shared>& shared, bool another,
                                 const std::function<void()>& before_each) {
  if (visits != nullptr) return evaluate_on_demand(shared, before_each);
  executor().append(planner->evaluate(static_cast<int>(shared.size()), another), nullptr);
  forward_all(shared, swap::Pass::evaluate, before_each);
}

Evaluation Session::Impl::evaluate(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                                   const Scored& scored, const Progress& progress) {
  const torch::NoGradGuard no_grad;
  flush();
  const std::uint64_t visits = static_cast<std::uint64_t>(count) * plan.layout->stages().size();
  std::uint64_t visited = 0;
  const auto before_each = [&] {
    if (progress) progress("evaluating", visited, visits);
    ++visited;
  };
  Evaluation result;
  double loss = 0;
  std::int64_t hits = 0;
  bool has_hits = true;
  const int last = static_cast<int>(plan.layout->stages().size()) - 1;
  for (std::int64_t begin = 0; begin < count; begin += plan.evaluated_at_once) {
    const std::int64_t end = std::min<std::int64_t>(count, begin + plan.evaluated_at_once);
    std::vector<MicroBatch> part;
    std::vector<Shared> shared;
    std::int64_t counted = 0;
    std::exception_ptr not_made;
    compute(true, [&] {
      counted = 0;
      part.clear();
      try {
        for (std::int64_t index = begin; index < end; ++index) part.push_back(make(index));
      } catch (const c10::Error& error) {
        if (is_out_of_memory(error)) throw;
        not_made = std::current_exception();
      } catch (...) {
        not_made = std::current_exception();
      }
      if (not_made) return;
      for (const MicroBatch& batch : part) counted += batch.target_tokens();
      shared = share(part);
    });
    if (not_made) {
      throw_if(executor().drain());
      throw NotMade{not_made};
    }
    result.tokens += counted;
    if (out_of_memory) break;
    expect_references(shared.size());
    evaluate_all(shared, end < count, before_each);
    for (int micro_batch = 0; micro_batch < static_cast<int>(part.size()); ++micro_batch) {
      before_each();
      const swap::Entered entered = enter(last, swap::Pass::evaluate, micro_batch);
      HeadScores scores;
      compute(true, [&] {
        scores = model->head_scores(weights(entered), carries[micro_batch], shared[micro_batch]);
        if (!scores.losses.defined()) return;
        scores.losses = models::download(scores.losses);
        scores.hits = models::download(scores.hits);
        if (!references.empty())
          scores.reference_losses = reference_losses(weights(entered), micro_batch, shared[micro_batch]);
        if (!scores.top_ids.defined()) return;
        scores.top_ids = models::download(scores.top_ids);
        scores.top_log_probabilities = models::download(scores.top_log_probabilities);
      });
      leave();
      if (out_of_memory) continue;
      loss += scores.loss_sum;
      has_hits = has_hits && scores.hits.defined();
      if (has_hits) hits += scores.hits.sum().item<std::int64_t>();
      if (scored) scored(begin + micro_batch, part[static_cast<std::size_t>(micro_batch)], scores);
    }
    carries.clear();
    references.clear();
  }
  throw_if(executor().drain());
  const auto tokens = static_cast<double>(std::max<std::int64_t>(result.tokens, 1));
  result.loss = loss / tokens;
  if (has_hits && result.tokens > 0) result.accuracy = static_cast<double>(hits) / tokens;
  return result;
}

std::vector<torch::Tensor> Session::Impl::next_logits(const std::vector<CachedRow>& rows, bool another) {
  const torch::NoGradGuard no_grad;
  if (pending || !ahead) flush();
  std::vector<Shared> shared;
  compute(true, [&] {
    shared.clear();
    for (const CachedRow& row : rows) shared.push_back(model->share_cached(row, torch_device));
  });
  std::vector<torch::Tensor> logits(rows.size());
  if (out_of_memory) return logits;
  const int last = static_cast<int>(plan.layout->stages().size()) - 1;
  evaluate_all(shared, another);
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    const swap::Entered entered = enter(last, swap::Pass::evaluate, row);
    compute(true, [&] {
      const torch::Tensor last_one = model->next_logits(weights(entered), carries[row], shared[row]);
      logits[row] = models::download(last_one.to(torch::kFloat32)).contiguous();
    });
    leave();
  }
  carries.clear();
  ahead = true;
  if (!another || out_of_memory) drain_ahead();  // else the caller draws while the next weights come
  return logits;
}

}  // namespace tierflow
