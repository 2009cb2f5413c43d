#include "own_client.hpp"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "convert.hpp"
#include "store.hpp"

namespace dpt::c10d_adapter {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Keys = std::vector<std::string>;
using Bytes = std::vector<uint8_t>;

// The process's own client of a store, and the program's, which lives as long.
struct Client {
  StorePtr theirs;
  StorePtr own;
  pid_t made_in = ::getpid();  // its connection is no forked child's

  explicit Client(const StorePtr& store) : theirs(store), own(store) {
    try {
      own = store->clone();
    } catch (const std::exception&) {
      // A store of the program's own that has no such function, or no second connection.
    }
  }
};

std::shared_ptr<Client> client_of(const StorePtr& store) {
  static auto* const mutex = new std::mutex;
  static auto* const known = new std::map<c10d::Store*, std::weak_ptr<Client>>;
  const std::lock_guard lock(*mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Client>& place = (*known)[store.get()];
  std::shared_ptr<Client> client = place.lock();
  if (!client || client->made_in != ::getpid()) {
    client = std::make_shared<Client>(store);
    place = client;
  }
  return client;
}

std::string joined(const Keys& keys) {
  std::string text;
  for (const std::string& key : keys) text += (text.empty() ? "" : ", ") + key;
  return text;
}

class OwnClient : public c10d::Store {
 public:
  OwnClient(std::shared_ptr<Client> client, OnWait on_wait)
      : Store(client->theirs->getTimeout()),
        client_(std::move(client)),
        on_wait_(std::move(on_wait)) {}

  c10::intrusive_ptr<OwnClient> with(OnWait on_wait) const {
    return c10::make_intrusive<OwnClient>(client_, std::move(on_wait));
  }

  StorePtr clone() override { return with(on_wait_); }

  void wait(const Keys& keys) override { wait(keys, timeout_); }

  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    if (await_keys(store(), keys, timeout, on_wait_)) return;
    C10_THROW_ERROR(
        DistStoreError,
        join_text(
            {"wait timeout after ", std::to_string(timeout.count()), "ms, keys: ", joined(keys)}));
  }

  Bytes get(const std::string& key) override {
    wait({key});
    return store().get(key);
  }

  std::vector<Bytes> multiGet(const Keys& keys) override {
    wait(keys);
    return store().multiGet(keys);
  }

  // These wait for nobody.
  void set(const std::string& key, const Bytes& value) override { store().set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return store().compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override { return store().add(key, value); }
  bool deleteKey(const std::string& key) override { return store().deleteKey(key); }
  bool check(const Keys& keys) override { return store().check(keys); }
  int64_t getNumKeys() override { return store().getNumKeys(); }
  void append(const std::string& key, const Bytes& value) override { store().append(key, value); }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    store().multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store().hasExtendedApi(); }

 private:
  c10d::Store& store() const { return *client_->own; }

  std::shared_ptr<Client> client_;
  OnWait on_wait_;
};

struct Opened : c10d::PrefixStore {
  static const std::string& prefix_of(const c10d::PrefixStore& store) {
    return store.*&Opened::prefix_;
  }
};

}  // namespace

StorePtr own_client(const StorePtr& store, OnWait on_wait) {
  // At the bottom, where NCCL looks for what all groups share.
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return c10::make_intrusive<c10d::PrefixStore>(
        Opened::prefix_of(*prefixed),
        own_client(prefixed->getUnderlyingStore(), std::move(on_wait)));
  }
  if (auto* const own = dynamic_cast<OwnClient*>(store.get())) return own->with(std::move(on_wait));
  return c10::make_intrusive<OwnClient>(client_of(store), std::move(on_wait));
}

}  // namespace dpt::c10d_adapter
