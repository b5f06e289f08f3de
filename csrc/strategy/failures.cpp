#include "strategy/failures.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "muster/error.h"

namespace muster {

Failure describe_cpp_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& e) {
    return {"muster::RemoteError", e.what(), Failure::Kind::remote};
  } catch (const CommError& e) {
    return {c10::demangle(typeid(e).name()), e.what(), Failure::Kind::transport};
  } catch (const std::exception& e) {
    return {c10::demangle(typeid(e).name()), e.what()};
  } catch (...) {
    return {"unknown exception", ""};
  }
}

bool peers_know(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    return true;
  } catch (const LayoutMismatch&) {
    return true;
  } catch (...) {
    return false;
  }
}

void Failures::set_handlers(ErrorDescriber describer, ErrorCapturer capturer) {
  describe_ = std::move(describer);
  capture_ = std::move(capturer);
}

std::exception_ptr Failures::cause_of(std::exception_ptr error, const ReplicaContext& replica) const {
  if (!replica.wait_error) return error;
  const auto failure = describe_(error);
  const bool is_its = failure.text.find(describe_cpp_error(replica.wait_error).text) != std::string::npos;
  return failure.kind == Failure::Kind::own && is_its ? replica.wait_error : error;
}

void Failures::raise(const std::vector<ReplicaRun>& outcomes, const std::vector<WindowSums::Failed>& told,
                     int own_rank) const {
  for (const auto& outcome : outcomes) {
    if (outcome.error && !is(outcome.error, Failure::Kind::remote)) std::rethrow_exception(outcome.error);
  }
  for (const auto& outcome : outcomes) {
    if (outcome.transport) std::rethrow_exception(outcome.transport);
  }
  if (!told.empty()) {
    const auto other =
        std::find_if(told.begin(), told.end(), [&](const auto& failed) { return failed.rank != own_rank; });
    const auto& [rank, replica, failure] = other != told.end() ? *other : told.front();
    throw RemoteError(rank, replica, failure.type, failure.text,
                      "the step of replica " + std::to_string(replica) + " on rank " + std::to_string(rank) +
                          " raised " + failure.type + ": " + failure.text +
                          "; the window was dropped on all ranks and training can go on");
  }
  for (const auto& outcome : outcomes) {
    if (outcome.error) std::rethrow_exception(outcome.error);
  }
}

}  // namespace muster
