#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>

#include "bindings/register.hpp"
#include "bootstrap/exchange.hpp"
#include "comm/c_api.hpp"
#include "comm/decisions.hpp"
#include "comm/fabric.hpp"
#include "comm/flight_record.hpp"
#include "comm/statistics.hpp"
#include "cuda/device_group.hpp"
#include "tuner/choose_device.hpp"
#include "tuner/profile.hpp"

namespace py = pybind11;

namespace dpt {

namespace {

py::dict to_dict(const DecisionRow& row) {
  const Decision& decision = row.decision;
  const auto put = [](py::dict& to, const Candidate& candidate) {
    to["chunk_bytes"] = candidate.chunk_bytes;
    to["channels"] = candidate.channels;
    to["threads"] = candidate.threads;
    to["delegated"] = candidate.delegated;
  };
  py::list candidates;
  for (const Measurement& time : decision.times) {
    py::dict candidate;
    candidate["algorithm"] = name_of(time.candidate.algorithm);
    put(candidate, time.candidate);
    candidate["median_us"] = time.median_us;
    candidate["spread_us"] = py::make_tuple(time.low_us, time.high_us);
    candidates.append(candidate);
  }
  py::dict plan;
  plan["op"] = name_of(row.collective);
  plan["ranks"] = row.group.ranks;
  plan["oversubscribed"] = row.group.oversubscribed;
  plan["device"] = std::string(row.group.device);
  plan["first_bytes"] = row.bytes.first;
  plan["last_bytes"] = row.bytes.last;
  plan["measured_bytes"] = row.bytes.nominal;
  // The rule of thumb has no parameters of its own; reports say None and zeros.
  const Candidate chosen = decision.chosen.value_or(Candidate{});
  plan["algorithm"] =
      decision.chosen ? py::object(py::str(name_of(chosen.algorithm))) : py::object(py::none());
  put(plan, chosen);
  plan["reason"] = decision.reason;
  plan["source"] = decision.source;
  plan["candidates"] = candidates;
  return plan;
}

py::list plans() {
  py::list plans;
  for (const DecisionRow& row : Decisions::instance().rows()) plans.append(to_dict(row));
  return plans;
}

py::list device_plans(const std::string& path) {
  py::list plans;
  for (const DeviceTable& table : device_tables(read_profile(path), DPT_VERSION)) {
    const TuningClass group{table.ranks, false, 1, table.device};
    for (int index = 0; index < kNumCollectives; ++index) {
      const auto collective = static_cast<Collective>(index);
      for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
        const Entry& times = table.times.at(collective, bucket);
        if (times.empty()) continue;
        const Limits limits{std::numeric_limits<size_t>::max(), true, true};
        Decision decision = decide(times, limits, "in the profile");
        decision.source = "profile " + path;
        plans.append(to_dict({group, collective, served_by(collective, bucket, group), decision}));
      }
    }
  }
  return plans;
}

py::dict to_dict(const NodeRun& run, const Outline& outline) {
  py::list phases;
  for (const Phase& phase : outline.phases) {
    py::dict entry;
    entry["where"] = phase.where;
    entry["what"] = phase.what;
    entry["bytes"] = phase.bytes;
    phases.append(entry);
  }
  py::dict plan;
  plan["op"] = name_of(run.collective);
  plan["algorithm"] = name_of(run.algorithm);
  plan["way"] = outline.way;
  plan["rails"] = outline.rails;
  plan["pieces"] = outline.pieces;
  plan["piece_bytes"] = outline.piece_bytes;
  plan["under_way"] = outline.under_way;
  plan["sent_bytes"] = outline.sent_bytes;
  plan["phases"] = phases;
  return plan;
}

py::list node_groups() {
  py::list groups;
  for (const NodeGroup& group : all_node_groups()) {
    py::list plans;
    for (const NodeRun& run : group.last) {
      for (const Outline& found : outline(run, group.layout)) plans.append(to_dict(run, found));
    }
    py::dict entry;
    entry["group"] = group.group;
    entry["nodes"] = group.layout.ranks;
    entry["sockets"] = group.sockets;
    entry["plans"] = plans;
    groups.append(entry);
  }
  return groups;
}

}  // namespace

void register_comm(py::module_& m) {
  m.def(
      "dpt_api",
      [] { return py::capsule(api(), DPT_API_CAPSULE); },
      "The C ABI's function table, for the c10d adapter.");
  m.def(
      "statistics",
      [] {
        py::list rows;
        for (const StatisticsRow& row : all_statistics()) {
          py::dict entry;
          entry["group"] = row.group;
          entry["op"] = name_of(row.collective);
          entry["algorithm"] = name_of(row.algorithm);
          entry["reason"] = row.reason;
          entry["calls"] = row.calls;
          entry["bytes"] = row.bytes;
          entry["time_us"] = row.time_us;
          rows.append(entry);
        }
        return rows;
      },
      "What every group of this process did: one row per group, op, algorithm and reason.");
  m.def(
      "arrivals",
      [] {
        py::list groups;
        for (const GroupArrivals& group : all_arrivals()) {
          py::list ranks;
          for (const Arrivals::Rank& rank : group.sums.ranks) {
            py::dict entry;
            entry["rank"] = rank.global_rank;
            entry["times_last"] = rank.times_last;
            entry["cost_us"] = static_cast<double>(rank.cost_ns) / 1e3;
            ranks.append(entry);
          }
          py::dict entry;
          entry["group"] = group.group;
          entry["operations"] = group.sums.operations;
          entry["waited_us"] = static_cast<double>(group.sums.waited_ns) / 1e3;
          entry["ranks"] = ranks;
          groups.append(entry);
        }
        return groups;
      },
      "Native operations of every group on host memory: how long this rank waited in them for "
      "others, and of this node's ranks how often each came last, and by how much.");
  m.def("node_groups",
        &node_groups,
        "Groups that span nodes: their ranks by node, the sockets that carry data between two "
        "ranks, and of each collective's last operation on host memory what its native plan did.");
  m.def(
      "identify_process",
      [](const std::string& job, int64_t rank, int64_t world_size, int signal) {
        FlightRecord::instance().identify({job, rank, world_size, signal});
      },
      py::arg("job"),
      py::arg("rank"),
      py::arg("world_size"),
      py::arg("signal"),
      "Says in the flight record who this process is; `signal` makes it write its stacks, 0: none "
      "does.");
  m.def(
      "describe_group",
      [](const std::string& name, const std::string& description) {
        FlightRecord::instance().describe_group(name, description);
      },
      py::arg("name"),
      py::arg("description"),
      "What the flight record shall call a group.");
  m.def(
      "longest_wait_s",
      [] { return static_cast<double>(FlightRecord::instance().longest_wait_ns()) / 1e9; },
      "For how many seconds this process has been in an operation that it or others wait for; 0: "
      "in none. Takes some microseconds.");
  m.def(
      "pause_flight_record",
      [](bool paused) { FlightRecord::instance().pause(paused); },
      py::arg("paused"),
      "Leaves operations out of the flight record, to measure what it costs.");
  m.def(
      "flight_record_fd",
      [] { return FlightRecord::instance().fd(); },
      "Descriptor of this process's flight record; -1: it has none.");
  // From so many bytes in all NCCL may go through nodes in stages.
  m.attr("staged_bytes") = kStagedBytes;
  m.def("plans",
        &plans,
        "What the tuner settled on in this process: one row per op, group shape and range of "
        "sizes; sizes are of one buffer. `algorithm` is None where the rule of thumb stays.");
  m.def(
      "spent_on_tuning_s",
      [] { return Decisions::instance().spent_us() / 1e6; },
      "Seconds that this process spent measuring plans.");
  m.def("device_plans",
        &device_plans,
        py::arg("path"),
        "What groups of GPUs decide by the profile at `path`, as `plans` gives it. RuntimeError or "
        "ValueError when it can't be read.");
  m.def(
      "is_registered",
      [](uintptr_t address, size_t bytes) {
        const MemoryPool& pool = Fabric::instance().memory();
        return pool.offset_of(reinterpret_cast<const void*>(address), bytes).has_value();
      },
      py::arg("address"),
      py::arg("bytes"),
      "Whether [address, address + bytes) lies in this process's registered memory.");
  m.def(
      "registered_memory",
      [] {
        const MemoryPool::Usage usage = Fabric::instance().memory().usage();
        py::dict result;
        result["in_use_bytes"] = usage.in_use_bytes;
        result["reserved_bytes"] = usage.reserved_bytes;
        return result;
      },
      "Bytes of registered memory: handed out now, and the most the pool ever spanned.");
  m.def(
      "trim_registered_memory",
      [] { return Fabric::instance().memory().trim(); },
      "Gives free registered memory back to the system; returns the bytes.");
  m.def("peer_mappings",
        &DeviceGroup::peer_mappings,
        "How often this process mapped another process's device memory; 0 where GPUs have no peer "
        "access.");
  m.def("reset_statistics", &reset_statistics, "Forgets all counts.");
  m.def(
      "dead_process",
      [](const std::string& mark) -> std::optional<int> {
        const auto pid = dead_process(mark);
        return pid ? std::optional(std::stoi(*pid)) : std::nullopt;
      },
      py::arg("mark"),
      "The pid of the process that left this mark in a group's store, if it has certainly ended.");
}

}  // namespace dpt
