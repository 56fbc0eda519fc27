#pragma once
// Plans that break a rule.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "swap/plan.h"

namespace tierflow::swap {

inline std::size_t last_of(const Plan& plan, TaskKind kind) {
  for (std::size_t at = plan.tasks.size(); at-- > 0;)
    if (plan.tasks[at].kind == kind) return at;
  throw std::logic_error(std::string("the plan has no ") + task_name(kind));
}
// The plan ends before the last task of this kind.
inline Plan cut(Plan plan, TaskKind kind) {
  plan.tasks.resize(last_of(plan, kind));
  return plan;
}
// That task changes places with the measurement before it, and each with what it waits for.
inline void store_before_measuring(Plan& plan, std::size_t write) {
  Task &later = plan.tasks[write], &earlier = plan.tasks[write - 1];
  ASSERT_EQ(earlier.kind, TaskKind::measure);
  std::swap(earlier, later);
  std::erase(earlier.dependencies, plan.first_id + write - 1);
  earlier.dependencies.insert(earlier.dependencies.end(), later.dependencies.begin(), later.dependencies.end());
  later.dependencies.push_back(plan.first_id + write - 1);
}

}  // namespace tierflow::swap
