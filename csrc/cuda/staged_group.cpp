#include "cuda/staged_group.hpp"

#include "staged/group.hpp"

namespace dpt {

cuda::Staging staging_of(const staged::Group& group) {
  const staged::Shape& shape = group.shape();
  return {shape.ranks, shape.slot_bytes, shape.depth, shape.threads, shape.nodes};
}

staged::Membership membership_of(const DeviceGroup::Setup& setup) {
  const auto ranks = static_cast<int>(setup.global_ranks.size());
  return {setup.between ? setup.layout : NodeLayout::one_node(ranks), setup.rank};
}

std::optional<DeviceGroup::Failure> failure_of(const staged::Group& group) {
  using Failure = DeviceGroup::Failure;
  using Kind = staged::Pipeline::Failure;
  const auto found = group.failure();
  if (!found) return std::nullopt;
  const auto kind = found->kind == Kind::kMismatch  ? Failure::kMismatch
                    : found->kind == Kind::kAborted ? Failure::kAborted
                                                    : Failure::kTimeout;
  return Failure{kind, found->peer, found->sequence};
}

namespace {

class StagedDeviceGroup final : public DeviceGroup {
 public:
  explicit StagedDeviceGroup(std::unique_ptr<staged::Group> group) : group_(std::move(group)) {}

  const cuda::Layout& layout() const override { return no_kernels_; }
  cuda::Staging staging() const override { return staging_of(*group_); }
  size_t memory_bytes() const override { return group_->memory_bytes(); }

  void launch(const dpt_request& request,
              const DevicePlan& plan,
              cuda::Stream stream,
              const staged::StartHooks& hooks) override {
    group_->start(request, {plan.chunk_bytes, plan.grid.threads}, stream, hooks);
  }

  std::optional<Failure> failure() const override { return failure_of(*group_); }
  void abort() override { group_->abort(); }
  void stop_waiting() override { group_->stop_waiting(); }
  void release() override { group_->release(); }

 private:
  const cuda::Layout no_kernels_{};
  std::unique_ptr<staged::Group> group_;
};

}  // namespace

std::unique_ptr<DeviceGroup> connect_staged(
    const DeviceGroup::Setup& setup,
    std::function<std::unique_ptr<staged::CopyEngine>()> make_engine) {
  return std::make_unique<StagedDeviceGroup>(
      staged::Group::connect({.ranks = membership_of(setup),
                              .global_ranks = setup.global_ranks,
                              .staging_bytes = setup.staging_bytes,
                              .threads = setup.workers.threads,
                              .cpus = setup.workers.cpus,
                              .oversubscribed = setup.workers.oversubscribed,
                              .all_gather = setup.all_gather,
                              .wait = setup.wait,
                              .make_engine = std::move(make_engine),
                              .between = setup.between}));
}

}  // namespace dpt
