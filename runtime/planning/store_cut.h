#pragma once
// The chunk size with which a run resumes from a store that was made under other budgets.
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/planning/moved_store.h"
#include "runtime/spec/packing.h"
#include "swap/layout.h"

namespace tierflow {

// Whether the chunks have about the size that chunk_elements_for() gives for this budget. False: their buffers take so
// much of it that hardly any work is done ahead, or the chunks are so small that there are too many requests and tasks.
bool suits(const swap::Layout& layout, std::uint64_t host_budget);

// The plan of a run that resumes from a store with chunks of `stored` elements. It has these chunks if they work and
// suit the budget, else the chunks that the budget gives. plan_with(chunk_elements), 0 for the budget's, makes a plan
// with a `layout`, and throws Exception where the budgets are too small for it. Where they are too small for both cuts,
// so does this.
template <class PlanWith>
auto plan_to_resume(std::uint64_t stored, std::uint64_t host_budget, const PlanWith& plan_with) {
  std::optional<decltype(plan_with(stored))> plan;
  try {
    plan.emplace(plan_with(stored));
  } catch (const Exception&) {
    if (chunk_elements_for(host_budget) >= stored) throw;
  }
  if (plan && suits(*plan->layout, host_budget)) return *std::move(plan);
  try {
    return plan_with(0);
  } catch (const Exception&) {
    if (!plan) throw;
  }
  return *std::move(plan);
}

// Whether a run can use a store with its present chunks if copying it into others failed for this reason. False for a
// signal, and if another process holds the store.
bool stays_as_it_is(const io::Error& why);

// Copies the store in storage.folders, whose chunks have `stored` elements, into other chunks if `plan` needs them.
// Returns the plan; if the copy fails, the plan for the store's present chunks.
template <class Plan, class PlanWith>
Plan cut_for(Plan plan, const io::VolumeOptions& storage, std::uint64_t stored, const PlanWith& plan_with,
             const Say& say, const Progress& progress) {
  const std::uint64_t cut = plan.layout->chunk_elements();
  if (cut == stored) return plan;
  try {
    recut_store(storage, cut, say, progress);
  } catch (const Exception& failed) {
    if (!stays_as_it_is(failed.error())) throw;
    try {
      plan = plan_with(stored);
    } catch (const Exception&) {
      throw failed;
    }
    say(std::string("the chunks of the state stay as they are: ") + failed.what());
  }
  return plan;
}

}  // namespace tierflow
