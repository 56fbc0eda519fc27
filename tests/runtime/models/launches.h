#pragma once
// Counts the kernels that a model would launch on a CUDA device, on torch's meta device: operations that call no other
// operation and make more than a view or memory, and each of our own kernels. A read of a value (item(), a copy to the
// host) throws there.
#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace tierflow::testing {

class Launches {
 public:
  Launches() {
    open_ = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begin, end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  }
  ~Launches() {
    at::removeCallback(handle_);
    open_ = nullptr;
  }
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  // Outside attention, whose kernels on a card are others than here: one call of an operator each way there.
  std::size_t count() const {
    std::size_t all = 0;
    for (const auto& [name, times] : by_name_) all += times;
    return all;
  }
  std::size_t attentions() const { return attentions_; }
  const std::map<std::string, std::size_t>& by_name() const { return by_name_; }

 private:
  struct Call {
    bool leaf = true, in_attention = false;
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    std::vector<Call>& calls = open_->calls_;
    const std::string name = function.name();
    const bool attends = name == "aten::scaled_dot_product_attention";
    const bool inside = !calls.empty() && calls.back().in_attention;
    if (!calls.empty()) calls.back().leaf = false;
    if (attends && !inside) ++open_->attentions_;
    // Gradients of blocks are written by hand but for attention's, which are autograd's.
    calls.push_back({.in_attention = inside || attends || function.scope() == at::RecordScope::BACKWARD_FUNCTION});
    return nullptr;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext*) {
    const Call call = open_->calls_.back();
    open_->calls_.pop_back();
    if (call.leaf && !call.in_attention && !makes_no_kernel(function.name())) ++open_->by_name_[function.name()];
  }
  static bool makes_no_kernel(const std::string& name) {
    static const std::set<std::string> views = {
        "aten::_reshape_alias", "aten::_unsafe_view", "aten::alias",      "aten::as_strided", "aten::contiguous",
        "aten::detach",         "aten::empty",        "aten::empty_like", "aten::expand",     "aten::empty_strided",
        "aten::flatten",        "aten::narrow",       "aten::permute",    "aten::reshape",    "aten::result_type",
        "aten::select",         "aten::slice",        "aten::squeeze",    "aten::t",          "aten::to",
        "aten::transpose",      "aten::unsqueeze",    "aten::view",       "aten::resize_",    "aten::set_",
        "aten::unflatten",      "aten::view_as",      "aten::expand_as",  "detach",           "aten::requires_grad_"};
    return views.contains(name) || name.starts_with("autograd::");
  }

  static inline thread_local Launches* open_ = nullptr;
  at::CallbackHandle handle_ = 0;
  std::vector<Call> calls_;
  std::map<std::string, std::size_t> by_name_;
  std::size_t attentions_ = 0;
};

}  // namespace tierflow::testing
