package serve

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// metrics counts the work of a server.
type metrics struct {
	prompt, completion atomic.Int64 // tokens
	first              *histogram   // time to the first token of a request

	mu       sync.Mutex
	requests map[requestKind]int64
	times    map[string]*histogram // of requests, by path
}

type requestKind struct {
	path   string
	status int
}

func newMetrics() *metrics {
	return &metrics{first: new(histogram), requests: map[requestKind]int64{}, times: map[string]*histogram{}}
}

func (m *metrics) request(path string, status int, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.requests[requestKind{path, status}]++
	h := m.times[path]
	if h == nil {
		h = new(histogram)
		m.times[path] = h
	}
	h.observe(took)
}

// buckets are the upper bounds of a histogram's buckets, in seconds. The last bucket has no bound.
var buckets = [...]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300}

// histogram counts times.
type histogram struct {
	mu    sync.Mutex
	count [len(buckets) + 1]int64
	sum   float64
}

func (h *histogram) observe(took time.Duration) {
	x := took.Seconds()
	i, _ := slices.BinarySearch(buckets[:], x)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.count[i]++
	h.sum += x
}

// write writes the histogram. labels are those of each line; "": none.
func (h *histogram) write(b *strings.Builder, name, labels string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := int64(0)
	with := func(le string) string { return "{" + strings.TrimPrefix(labels+`,le="`+le+`"`, ",") + "}" }
	for i, n := range h.count {
		all += n
		le := "+Inf"
		if i < len(buckets) {
			le = fmt.Sprint(buckets[i])
		}
		fmt.Fprintf(b, "%s_bucket%s %d\n", name, with(le), all)
	}
	if labels != "" {
		labels = "{" + labels + "}"
	}
	fmt.Fprintf(b, "%s_sum%s %g\n%s_count%s %d\n", name, labels, h.sum, name, labels, all)
}

func (s *Server) writeMetrics(w http.ResponseWriter, _ *http.Request, _ []byte) error {
	var b strings.Builder
	m, stats := s.metrics, s.engine.Stats()
	about := func(name, kind, what string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, what, name, kind) }
	for _, c := range []struct {
		name, kind, what string
		value            int64
	}{
		{"leanlm_texts", "gauge", "Texts of all requests.", int64(s.running())},
		{"leanlm_texts_live", "gauge", "Texts that are computed.", int64(stats.Live)},
		{"leanlm_texts_waiting", "gauge", "Texts that wait for the batch or for the cache.", int64(stats.Waiting)},
		{"leanlm_batch_texts", "gauge", "Most texts that are computed at a time.", int64(s.engine.Options().Batch)},
		{"leanlm_cache_tokens", "gauge", "Capacity of the cache in tokens.", int64(s.engine.Options().Tokens)},
		{"leanlm_cache_free_tokens", "gauge", "Free capacity of the cache in tokens.", int64(min(stats.FreeTokens, s.engine.Options().Tokens))},
		{"leanlm_prompt_tokens_total", "counter", "Tokens of prompts.", m.prompt.Load()},
		{"leanlm_completion_tokens_total", "counter", "Tokens of continuations.", m.completion.Load()},
		{"leanlm_steps_total", "counter", "Steps of the engine.", int64(stats.Steps)},
		{"leanlm_step_tokens_total", "counter", "Tokens that the steps computed.", int64(stats.Rows)},
		{"leanlm_shared_tokens_total", "counter", "Tokens of prompts that were in the cache.", int64(stats.SharedTokens)},
		{"leanlm_preemptions_total", "counter", "Times that a text had to wait again, since the cache was full.", int64(stats.Preempted)},
		{"leanlm_resumed_total", "counter", "Times that such a text had its keys and values from a file.", int64(stats.Resumed)},
		{"leanlm_guessed_tokens_total", "counter", "Guesses that were computed.", int64(stats.Guessed)},
		{"leanlm_accepted_tokens_total", "counter", "Guesses that were right.", int64(stats.Accepted)},
	} {
		about(c.name, c.kind, c.what)
		fmt.Fprintf(&b, "%s %d\n", c.name, c.value)
	}
	about("leanlm_first_token_seconds", "histogram", "Time from a request to its first token.")
	m.first.write(&b, "leanlm_first_token_seconds", "")
	m.mu.Lock()
	defer m.mu.Unlock()
	kinds, paths := make([]requestKind, 0, len(m.requests)), make([]string, 0, len(m.times))
	for k := range m.requests {
		kinds = append(kinds, k)
	}
	for p := range m.times {
		paths = append(paths, p)
	}
	slices.SortFunc(kinds, func(x, y requestKind) int {
		return cmp.Or(cmp.Compare(x.path, y.path), cmp.Compare(x.status, y.status))
	})
	slices.Sort(paths)
	about("leanlm_requests_total", "counter", "Requests that were answered.")
	for _, k := range kinds {
		fmt.Fprintf(&b, "leanlm_requests_total{path=%q,status=\"%d\"} %d\n", k.path, k.status, m.requests[k])
	}
	about("leanlm_request_seconds", "histogram", "Time of a request.")
	for _, p := range paths {
		m.times[p].write(&b, "leanlm_request_seconds", fmt.Sprintf("path=%q", p))
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	if _, err := w.Write([]byte(b.String())); err != nil {
		return begunError{err}
	}
	return nil
}
