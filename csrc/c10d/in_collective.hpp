// Counts the time that the program's own threads spend in collectives on host memory, and how many
// of those failed. Counts as well how many bytes the program gave to operations.
#pragma once

#include <cstdint>

namespace dpt::c10d_adapter {

// While one lives its thread is in a collective: it starts one or waits for its end. Where they
// nest the outermost counts. Two looks at the clock and one addition.
class InCollective {
 public:
  InCollective();
  ~InCollective();
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

 private:
  int64_t began_ns_;  // -1 inside another
};

// For operations that are waited for through their futures, where nobody can see the wait. DDP's
// reducer, for one, waits for its buckets' operations at the end of backward. Only the last
// operation since the step before counts, from when it began to its end. The ones before it ran
// beside computation.
int64_t now_ns();
void note_followed(int64_t began_ns);  // at its end
void step_ended();                     // counts it

// Time not hidden behind computation, of all threads together since the process started.
double exposed_s();

void note_failure();
uint64_t failures();

// Count this rank's part in operations with other ranks.
void note_given(uint64_t bytes);
uint64_t given_bytes();

}  // namespace dpt::c10d_adapter
