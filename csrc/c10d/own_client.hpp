// A client of the job's rendezvous store that is ours, and in which no thread waits for another.
//
// NOTE [Own client] A TCPStore's client has one connection and one lock, and who waits for a key
// holds both until it comes. Threads of ours meet other ranks for several groups at a time.
// Meanwhile the program's own thread may wait there for what another rank does later. Ranks that
// begin their groups in different orders would wait for each other in a circle. So the groups of a
// process have one client of their own, and there who waits asks again and again; between two
// questions it is everybody's. Gloo and NCCL get it too, as their ranks meet in the store.
#pragma once

#include "store.hpp"

namespace dpt::c10d_adapter {

// The same keys as in `store`, whose program goes on with its own client. A store that can't be
// cloned is shared with it. `on_wait` may be empty.
c10::intrusive_ptr<c10d::Store> own_client(const c10::intrusive_ptr<c10d::Store>& store,
                                           OnWait on_wait = nullptr);

}  // namespace dpt::c10d_adapter
