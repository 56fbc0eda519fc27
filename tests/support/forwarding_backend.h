#pragma once
// What tests put between an engine and the real backend: everything goes through, unless a test has it otherwise.
#include <chrono>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "io/backend.h"

namespace tierflow::testing {

class ForwardingBackend : public io::Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<io::Backend> inner) : inner_(std::move(inner)) {}
  io::EngineKind kind() const override { return inner_->kind(); }
  io::Error register_files(std::span<const int> files) override { return inner_->register_files(files); }
  bool registered_files() const override { return inner_->registered_files(); }
  io::Error register_memory(std::span<const std::span<std::byte>> regions) override {
    return inner_->register_memory(regions);
  }
  bool push(const io::KernelOp& op) override { return inner_->push(op); }
  void reap(std::vector<io::KernelResult>& results, std::chrono::nanoseconds timeout) override {
    inner_->reap(results, answers_.empty() ? timeout : std::chrono::nanoseconds{0});
    results.insert(results.end(), answers_.begin(), answers_.end());
    answers_.clear();
  }
  void wake() override { inner_->wake(); }

 protected:
  // Takes an operation that the drive never sees; the next reap() has this result of it.
  bool answer(const io::KernelOp& op, std::int64_t value) {
    answers_.push_back({.ticket = op.ticket, .value = value});
    return true;
  }

 private:
  std::unique_ptr<io::Backend> inner_;
  std::vector<io::KernelResult> answers_;
};

}  // namespace tierflow::testing
