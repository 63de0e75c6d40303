#include "runtime/cluster/control_channel.h"

#include "runtime/cluster/watcher.h"

ControlChannel::ControlChannel(const Place& place, const ControlSettings& settings, const Share& share)
    : settings_(settings) {
    if (place.size == 1) {
        members_ = {this_member(0)};
        return;
    }
    Group group = open_group(place, settings.opening, share);
    members_ = group.members;
    watcher_ = std::make_unique<Watcher>(place.rank, std::move(group), settings.watch, settings.answer_s, progress_);
}

ControlChannel::~ControlChannel() = default;

std::vector<std::string> ControlChannel::all_gather(const std::string& mine, const char* what) {
    if (!watcher_) return {mine};
    const std::string answer = watcher_->ask(Question::all_gather, what, mine);
    FieldReader reader(answer);
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < members_.size(); ++rank) texts.push_back(reader.text());
    return texts;
}

std::string ControlChannel::broadcast(const std::string& mine, const char* what) {
    return watcher_ ? watcher_->ask(Question::broadcast, what, mine) : mine;
}

void ControlChannel::require_same(const std::string& mine, const char* what) {
    if (watcher_) watcher_->ask(Question::require_same, what, mine);
}

void ControlChannel::on_end(std::function<void()> callback) {
    if (watcher_) watcher_->on_end(std::move(callback));
}

void ControlChannel::leave() {
    if (watcher_) watcher_->leave(settings_.leave_s);
}

void ControlChannel::leave_with_error(Exit code, const std::string& sentence) {
    if (watcher_) watcher_->leave_with_error(code, sentence);
}
