#include "comm/message_exchange.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/log.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

// How much of a message in registered memory one step copies, so that others get their turn.
constexpr size_t kStepBytes = 1 << 20;

std::string elements(uint64_t count, int32_t dtype) {
  return std::to_string(count) + " x " + name_of(static_cast<DataType>(dtype));
}

// Queues by key, of which none is empty.
template <typename Queues>
auto take_first(Queues& queues, typename Queues::iterator queue) {
  auto first = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) queues.erase(queue);
  return first;
}

}  // namespace

MessageExchange::MessageExchange(Segment& segment, std::string group, Finish finish)
    : segment_(segment), group_(std::move(group)), finish_(std::move(finish)) {
  const int size = segment.size();
  for (int rank = 0; rank < size; ++rank) {
    Peer peer;
    peer.rank = rank;
    peer.out = Mailbox(segment.mailboxes(), segment.rank(), rank, size);
    peer.in = Mailbox(segment.mailboxes(), rank, segment.rank(), size);
    peers_.push_back(std::move(peer));
  }
}

std::string MessageExchange::rank_name(int rank) const {
  return rank == DPT_ANY_RANK ? "any rank" : "rank " + std::to_string(segment_.global_rank(rank));
}

std::string MessageExchange::describe(const Post& post) const {
  return std::string(post.is_send ? "send #" : "recv #") + std::to_string(post.number) + " (" +
         elements(post.count, post.dtype) + (post.is_send ? " to " : " from ") +
         rank_name(post.peer) + ", tag " + std::to_string(post.tag) + ") of group " + group_ +
         " on " + rank_name(segment_.rank());
}

Error MessageExchange::mismatch(const Post& post, int peer, uint64_t count, int32_t dtype) const {
  const std::string theirs = elements(count, dtype);
  const std::string mine = elements(post.count, post.dtype);
  return Error(DPT_ERR_MISMATCH,
               describe(post) + ": " + rank_name(post.is_send ? segment_.rank() : peer) + " sent " +
                   (post.is_send ? mine : theirs) + ", " +
                   rank_name(post.is_send ? peer : segment_.rank()) + " expected " +
                   (post.is_send ? theirs : mine) + ", tag " + std::to_string(post.tag) +
                   ". A message must be received with the size and dtype it was sent with");
}

void MessageExchange::finish(const PostPtr& post, std::optional<Error> error) {
  unfinished_.erase(post->number);
  finish_(post, std::move(error));
}

void MessageExchange::post(PostPtr post) {
  unfinished_[post->number] = post;
  if (post->is_send) {
    peers_[post->peer].sends.push_back(std::move(post));
    return;
  }
  if (post_matches_unexpected(post)) return;
  ++(post->peer == DPT_ANY_RANK ? any_receives_ : peers_[post->peer].receives);
  receives_[{post->peer, post->tag}].push_back(post);
}

bool MessageExchange::progress() {
  bool moved = false;
  for (Peer& peer : peers_) {
    moved |= progress_sends(peer);
    moved |= progress_receives(peer);
  }
  return moved;
}

bool MessageExchange::progress_sends(Peer& peer) {
  if (peer.sends.empty() && peer.announced.empty() && !peer.sending) return false;
  bool moved = false;
  // One at a time: the receiver grants the next when it has all of the one before.
  for (Reply reply; !peer.sending; moved = true) {
    bool wanted_room = false;
    if (!peer.out.take(&reply, &wanted_room)) break;
    if (wanted_room) segment_.ring(peer.rank);
    answered(peer, reply);
  }
  if (peer.sending) moved |= send_on(peer);
  while (!peer.sends.empty()) {
    const PostPtr post = peer.sends.front();
    if (!post_letter(peer, post)) break;
    peer.sends.pop_front();
    moved = true;
  }
  return moved;
}

bool MessageExchange::post_letter(Peer& peer, const PostPtr& post) {
  if (segment_.has_left(peer.rank)) {
    if (segment_.aborted()) return false;  // the next step says why
    finish(post,
           Error(DPT_ERR_PEER_LOST, describe(*post) + ": " + rank_name(peer.rank) + kHasLeft));
    return true;
  }
  const size_t bytes = post->bytes();
  const bool inside = bytes <= Mailbox::kMostInside;
  const Letter letter{
      .number = peer.letters + 1,
      .count = post->count,
      .bytes = bytes,
      .offset = inside ? kNowhere : segment_.offset_of(post->input, bytes).value_or(kNowhere),
      .tag = post->tag,
      .dtype = post->dtype,
      .inside = inside,
      .filler = 0};
  if (!peer.out.post(letter, post->input)) return false;
  ++peer.letters;
  segment_.ring(peer.rank);
  if (inside) {
    finish(post);
  } else {
    peer.announced[letter.number] = post;
  }
  return true;
}

void MessageExchange::answered(Peer& peer, const Reply& reply) {
  const auto found = peer.announced.find(reply.number);
  if (found == peer.announced.end()) {
    // A small message, whose send has long ended.
    log(LogLevel::kError,
        "group " + group_ + ": message " + std::to_string(reply.number) + " from " +
            rank_name(segment_.rank()) + " was refused: " + rank_name(peer.rank) + " expected " +
            elements(reply.count, reply.dtype));
    return;
  }
  const PostPtr post = found->second;
  peer.announced.erase(found);
  switch (reply.kind) {
    case Reply::kRefused:
      return finish(post, mismatch(*post, peer.rank, reply.count, reply.dtype));
    case Reply::kTaken:
      return finish(post);
    case Reply::kGranted:
      const auto way = reply.offset == kNowhere ? Transfer::kSlots : Transfer::kPlace;
      peer.sending = Transfer{post, way, reply.number, reply.offset};
  }
}

bool MessageExchange::send_on(Peer& peer) {
  Transfer& transfer = *peer.sending;
  const size_t bytes = transfer.post->bytes();
  const auto* const from = static_cast<const char*>(transfer.post->input);
  bool moved = false;
  if (transfer.way == Transfer::kPlace) {
    const size_t step = std::min(kStepBytes, bytes - transfer.done);
    char* const to = segment_.pool(peer.rank) + transfer.offset;
    copy(to + transfer.done, from + transfer.done, step);
    transfer.done += step;
    moved = true;
    if (transfer.done == bytes) {
      // An empty slot that says: all is there. The slots are free, or nothing had been granted.
      DPT_CHECK(peer.out.free_slot() != nullptr);
      peer.out.filled_slot();
      segment_.ring(peer.rank);
    }
  }
  while (transfer.done < bytes) {
    char* const slot = transfer.way == Transfer::kSlots ? peer.out.free_slot() : nullptr;
    if (slot == nullptr) return moved;
    const size_t piece = std::min(Mailbox::kSlotBytes, bytes - transfer.done);
    copy(slot, from + transfer.done, piece);
    transfer.done += piece;
    peer.out.filled_slot();
    segment_.ring(peer.rank);
    moved = true;
  }
  finish(transfer.post);
  peer.sending.reset();
  return true;
}

bool MessageExchange::waits_for_letters(const Peer& peer) const {
  return peer.receives > 0 || (any_receives_ > 0 && peer.rank != segment_.rank());
}

bool MessageExchange::progress_receives(Peer& peer) {
  bool moved = answer_on(peer);
  while (waits_for_letters(peer)) {
    const Letter* const letter = peer.in.front();
    if (letter == nullptr) break;
    const char* const content = peer.in.content_of(*letter);
    if (const PostPtr post = take_receive_for(peer, letter->tag)) {
      match(peer, post, *letter, content);
    } else {
      const size_t inside = letter->inside ? letter->bytes : 0;
      peer.unexpected[letter->tag].push_back({arrivals_++, *letter, {content, content + inside}});
    }
    if (peer.in.pop()) segment_.ring(peer.rank);
    moved = true;
  }
  if (peer.receiving) moved |= receive_on(peer);
  return moved;
}

PostPtr MessageExchange::take_receive_for(Peer& peer, int tag) {
  auto first = receives_.find({peer.rank, tag});
  if (const auto any = receives_.find({DPT_ANY_RANK, tag});
      any != receives_.end() && peer.rank != segment_.rank()) {
    const bool named_is_later =
        first == receives_.end() || first->second.front()->number > any->second.front()->number;
    if (named_is_later) first = any;
  }
  if (first == receives_.end()) return nullptr;
  PostPtr post = take_first(receives_, first);
  --(post->peer == DPT_ANY_RANK ? any_receives_ : peer.receives);
  return post;
}

bool MessageExchange::post_matches_unexpected(const PostPtr& post) {
  Peer* sender = nullptr;
  std::map<int, std::deque<Unexpected>>::iterator first;
  for (Peer& peer : peers_) {
    if (post->peer != peer.rank && (post->peer != DPT_ANY_RANK || peer.rank == segment_.rank())) {
      continue;
    }
    const auto found = peer.unexpected.find(post->tag);
    if (found == peer.unexpected.end()) continue;
    if (sender != nullptr && first->second.front().arrival < found->second.front().arrival) {
      continue;
    }
    sender = &peer;
    first = found;
  }
  if (sender == nullptr) return false;
  const Unexpected message = take_first(sender->unexpected, first);
  match(*sender, post, message.letter, message.content.data());
  return true;
}

void MessageExchange::match(Peer& peer,
                            const PostPtr& post,
                            const Letter& letter,
                            const char* content) {
  post->partner = peer.rank;
  if (post->source != nullptr) *post->source = peer.rank;
  if (letter.count != post->count || letter.dtype != post->dtype) {
    const Reply refusal{.number = letter.number,
                        .offset = kNowhere,
                        .count = post->count,
                        .kind = Reply::kRefused,
                        .dtype = post->dtype};
    Error error = mismatch(*post, peer.rank, letter.count, letter.dtype);
    if (!letter.inside) return answer(peer, {refusal, post, std::move(error)});
    // Nobody waits for this one, or makes room for it.
    if (peer.in.reply(refusal)) segment_.ring(peer.rank);
    return finish(post, std::move(error));
  }
  if (letter.inside) {
    copy(post->output, content, letter.bytes);
    return finish(post);
  }
  peer.matched.push_back({post, letter});
  grant_next(peer);
}

void MessageExchange::grant_next(Peer& peer) {
  if (peer.receiving || peer.matched.empty()) return;
  const Match next = std::move(peer.matched.front());
  peer.matched.pop_front();
  const uint64_t number = next.letter.number;
  if (next.letter.offset != kNowhere && segment_.pool(peer.rank) != nullptr) {
    peer.receiving = Transfer{next.post, Transfer::kTake, number, next.letter.offset};
    return;
  }
  const uint64_t offset =
      segment_.offset_of(next.post->output, next.letter.bytes).value_or(kNowhere);
  const auto way = offset == kNowhere ? Transfer::kSlots : Transfer::kPlace;
  peer.receiving = Transfer{next.post, way, number, offset};
  answer(peer,
         {{.number = number,
           .offset = offset,
           .count = next.post->count,
           .kind = Reply::kGranted,
           .dtype = next.post->dtype}});
}

void MessageExchange::answer(Peer& peer, Answer answer) {
  peer.answers.push_back(std::move(answer));
  answer_on(peer);
}

bool MessageExchange::answer_on(Peer& peer) {
  bool moved = false;
  for (; !peer.answers.empty(); moved = true) {
    // A rank that has left reads no more.
    if (!peer.in.reply(peer.answers.front().reply) && !segment_.has_left(peer.rank)) break;
    segment_.ring(peer.rank);
    const Answer given = std::move(peer.answers.front());
    peer.answers.pop_front();
    if (given.post) finish(given.post, given.error);
  }
  return moved;
}

bool MessageExchange::receive_on(Peer& peer) {
  Transfer& transfer = *peer.receiving;
  const size_t bytes = transfer.post->bytes();
  auto* const to = static_cast<char*>(transfer.post->output);
  bool moved = false;
  if (transfer.way == Transfer::kTake) {
    const size_t step = std::min(kStepBytes, bytes - transfer.done);
    const char* const from = segment_.pool(peer.rank) + transfer.offset;
    copy(to + transfer.done, from + transfer.done, step);
    transfer.done += step;
    moved = true;
    if (transfer.done < bytes) return moved;
    answer(peer,
           {{.number = transfer.number,
             .offset = kNowhere,
             .count = transfer.post->count,
             .kind = Reply::kTaken,
             .dtype = transfer.post->dtype},
            transfer.post});
  }
  while (transfer.done < bytes) {
    const char* const slot = peer.in.full_slot();
    if (slot == nullptr) return moved;
    size_t piece = bytes;  // the sender has placed all of it
    if (transfer.way == Transfer::kSlots) {
      piece = std::min(Mailbox::kSlotBytes, bytes - transfer.done);
      copy(to + transfer.done, slot, piece);
    }
    transfer.done += piece;
    peer.in.emptied_slot();
    segment_.ring(peer.rank);
    moved = true;
  }
  if (transfer.way != Transfer::kTake) finish(transfer.post);
  peer.receiving.reset();
  grant_next(peer);
  return true;
}

void MessageExchange::end_those_waiting_for_who_left() {
  std::vector<bool> left(peers_.size());
  bool others_left = true;
  for (const Peer& peer : peers_) {
    left[peer.rank] = segment_.has_left(peer.rank);
    if (peer.rank != segment_.rank()) others_left &= left[peer.rank];
  }
  if (std::find(left.begin(), left.end(), true) == left.end()) return;
  // A rank that gave up first and left then is not the reason.
  if (segment_.aborted()) return;
  // All they sent before they left still counts; they did not leave before it was in the mailbox.
  progress();
  std::vector<PostPtr> lost;
  for (const auto& [number, post] : unfinished_) {
    if (post->partner == DPT_ANY_RANK ? others_left : left[post->partner]) lost.push_back(post);
  }
  for (const PostPtr& post : lost) {
    forget(post);
    const std::string who =
        post->partner == DPT_ANY_RANK ? "every other rank" : rank_name(post->partner);
    finish(post, Error(DPT_ERR_PEER_LOST, describe(*post) + ": " + who + kHasLeft));
  }
}

void MessageExchange::forget(const PostPtr& post) {
  const auto queue = receives_.find({post->peer, post->tag});
  if (queue != receives_.end() && std::erase(queue->second, post) != 0) {
    --(post->peer == DPT_ANY_RANK ? any_receives_ : peers_[post->peer].receives);
    if (queue->second.empty()) receives_.erase(queue);
  }
  if (post->partner == DPT_ANY_RANK) return;
  Peer& peer = peers_[post->partner];
  std::erase(peer.sends, post);
  std::erase_if(peer.announced, [&](const auto& each) { return each.second == post; });
  std::erase_if(peer.matched, [&](const Match& each) { return each.post == post; });
  std::erase_if(peer.answers, [&](const Answer& each) { return each.post == post; });
  if (peer.sending && peer.sending->post == post) peer.sending.reset();
  if (peer.receiving && peer.receiving->post == post) peer.receiving.reset();
}

void MessageExchange::end_all(const Error& error) {
  receives_.clear();
  any_receives_ = 0;
  for (Peer& peer : peers_) {
    peer.sends.clear();
    peer.announced.clear();
    peer.matched.clear();
    peer.answers.clear();
    peer.sending.reset();
    peer.receiving.reset();
    peer.receives = 0;
  }
  for (const auto& [number, post] : std::exchange(unfinished_, {})) {
    const std::string who = describe(*post);
    if (std::string_view(error.what()).starts_with(who)) {
      finish_(post, error);
      continue;
    }
    const auto status = error.status() == DPT_ERR_PEER_LOST ? DPT_ERR_PEER_LOST : DPT_ERR_ABORTED;
    finish_(post, Error(status, who + ": " + error.what()));
  }
}

PostPtr MessageExchange::first_expired() const {
  for (const auto& [number, post] : unfinished_) {
    if (post->deadline.expired()) return post;
  }
  return nullptr;
}

}  // namespace dpt
