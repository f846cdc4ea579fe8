/* A place for one change, and a list of news. */
#include "server/executor/mailbox.h"

#include <sys/eventfd.h>
#include <unistd.h>

bool kvp_mailbox_init(struct kvp_mailbox *mailbox, int serving_event) {
  mailbox->serving_event = serving_event;
  mailbox->control_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  (void)sem_init(&mailbox->change_done, 0, 0);
  return mailbox->control_event >= 0;
}

void kvp_mailbox_deinit(struct kvp_mailbox *mailbox) {
  (void)close(mailbox->control_event);
  (void)sem_destroy(&mailbox->change_done);
}

enum kvp_status kvp_mailbox_change(struct kvp_mailbox *mailbox, struct kvp_object_change *change) {
  atomic_store(&mailbox->change, change);
  (void)eventfd_write(mailbox->serving_event, 1);
  if (atomic_load(&mailbox->closed) && atomic_exchange(&mailbox->change, NULL) != NULL) {
    return kvp_error_set(&change->error, KVP_CANCELLED, "the executor stops");
  }
  while (sem_wait(&mailbox->change_done) != 0) {
  }
  return change->status;
}

struct kvp_news *kvp_mailbox_read(struct kvp_mailbox *mailbox) {
  eventfd_t count = 0;
  (void)eventfd_read(mailbox->control_event, &count);
  struct kvp_news *newest = atomic_exchange(&mailbox->news, NULL);
  struct kvp_news *oldest = NULL;
  while (newest != NULL) {
    struct kvp_news *older = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = older;
  }
  return oldest;
}

bool kvp_mailbox_has_change(struct kvp_mailbox *mailbox) {
  return atomic_load(&mailbox->change) != NULL;
}

struct kvp_object_change *kvp_mailbox_take(struct kvp_mailbox *mailbox) {
  if (atomic_load_explicit(&mailbox->change, memory_order_relaxed) == NULL) {
    return NULL;
  }
  return atomic_exchange(&mailbox->change, NULL);
}

void kvp_mailbox_answer(struct kvp_mailbox *mailbox) {
  (void)sem_post(&mailbox->change_done);
}

void kvp_mailbox_tell(struct kvp_mailbox *mailbox, struct kvp_news *news, enum kvp_news_kind kind) {
  news->kind = kind;
  news->next = atomic_load(&mailbox->news);
  while (!atomic_compare_exchange_weak(&mailbox->news, &news->next, news)) {
  }
  (void)eventfd_write(mailbox->control_event, 1);
}

void kvp_mailbox_close(struct kvp_mailbox *mailbox) {
  atomic_store(&mailbox->closed, true);
  struct kvp_object_change *change = kvp_mailbox_take(mailbox);
  if (change != NULL) {
    change->status = kvp_error_set(&change->error, KVP_CANCELLED, "the executor stops");
    kvp_mailbox_answer(mailbox);
  }
}
