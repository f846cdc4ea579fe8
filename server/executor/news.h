/* What the serving thread has to tell the control thread: a link in something of either's. */
#ifndef KVPOOL_EXECUTOR_NEWS_H
#define KVPOOL_EXECUTOR_NEWS_H

enum kvp_news_kind {
  KVP_NEWS_CHANGE_DONE, /* of a struct kvp_object_change that took its time */
  KVP_NEWS_RING_FAILED, /* of a struct kvp_served_ring */
};

struct kvp_news {
  enum kvp_news_kind kind;
  struct kvp_news *next;
};

#endif
