package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// fault is what is wrong with a request of TestLoad.
type fault int

const (
	none fault = iota
	gone       // the client goes at some time
	slow       // the client reads some bytes late, and then goes
	badJSON
	longPrompt
	faults
)

// loadBody returns the body of a request for at most so many tokens with a fault, and the path.
func loadBody(rng *rand.Rand, i, tokens int, f fault) (path, body string) {
	fields := fmt.Sprintf(`"max_tokens": %d, "n": %d, "stream": %v, "priority": %d`, 1+rng.IntN(tokens), 1+rng.IntN(2), f == slow || rng.IntN(2) == 0, rng.IntN(3))
	switch rng.IntN(4) {
	case 0:
		fields += `, "stop": ["king", "e"]`
	case 1:
		fields += `, "logit_bias": {"2": -100}`
	case 2:
		fields += `, "timeout": 0.02`
	}
	switch {
	case f == badJSON:
		return "/v1/completions", `{"prompt": "Once", ` + fields[:rng.IntN(len(fields))]
	case f == longPrompt:
		return "/v1/completions", fmt.Sprintf(`{"prompt": "%s", %s}`, strings.Repeat("Once upon ", 100+rng.IntN(100)), fields)
	case rng.IntN(3) > 0:
		return "/v1/completions", fmt.Sprintf(`{"prompt": "Once upon a time there was a king who had a ship and three daughters. One day the king went to the river and said %d", %s}`, i%50, fields)
	}
	if !strings.Contains(fields, "stop") {
		fields += fmt.Sprintf(`, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"p%d": {}}, "required": ["p%d"]}}}`, i%20, i%20)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"messages": [{"role": "user", "content": "Who is number %d?"}], %s}`, i%50, fields)
}

// oneLayer leaves the first layer alone in a folder of the shipped model.
func oneLayer(t *testing.T, dir string) {
	t.Helper()
	edit := func(name string, change func(data []byte) ([]byte, error)) {
		path := filepath.Join(dir, name)
		data, err := os.ReadFile(path)
		if err == nil {
			data, err = change(data)
		}
		if err = errors.Join(err, os.WriteFile(path, data, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	edit("config.json", func(data []byte) ([]byte, error) {
		return regexp.MustCompile(`"num_hidden_layers": \d+`).ReplaceAll(data, []byte(`"num_hidden_layers": 1`)), nil
	})
	edit("model.safetensors", func(data []byte) ([]byte, error) {
		length := binary.LittleEndian.Uint64(data)
		header, weights, kept := map[string]json.RawMessage{}, data[8+length:], []byte(nil)
		if err := json.Unmarshal(data[8:8+length], &header); err != nil {
			return nil, err
		}
		for name, raw := range header {
			var entry struct {
				DType   string `json:"dtype"`
				Shape   []int  `json:"shape"`
				Offsets [2]int `json:"data_offsets"`
			}
			err := json.Unmarshal(raw, &entry)
			if later := regexp.MustCompile(`layers\.[1-9]`).MatchString(name); later || name == "__metadata__" || err != nil {
				if delete(header, name); later || name == "__metadata__" {
					continue
				}
				return nil, err
			}
			from := entry.Offsets
			entry.Offsets = [2]int{len(kept), len(kept) + from[1] - from[0]}
			kept = append(kept, weights[from[0]:from[1]]...)
			if header[name], err = json.Marshal(entry); err != nil {
				return nil, err
			}
		}
		text, err := json.Marshal(header)
		return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, kept), err
	})
}

// TestLoad: requests of which half are cancelled at random times, and some have other faults, in a cache and a queue that are often full,
// leave nothing: no text, no page, and, of 10,000 requests, no memory.
func TestLoad(t *testing.T) {
	testLoad(t, reftest.Cases(t, 120, 10000), 60, 30*time.Millisecond, nil)
}

func TestGPULoad(t *testing.T) {
	testLoad(t, reftest.Cases(t, 24, 300), 30, time.Second, devicetest.Open(t))
}

// testLoad sends requests for at most so many tokens. A client that goes does so within leaves.
func testLoad(t *testing.T, requests, tokens int, leaves time.Duration, gpu *device.GPU) {
	o, dir := decoder.Options{Batch: 4, Tokens: 256, Swap: t.TempDir(), Device: gpu}, chatModel(t)
	if gpu != nil {
		oneLayer(t, dir) // an emulated GPU is slow
	}
	r := serverOf(t, dir, Options{Queue: 8}, o)
	rng := reftest.Rand(t)
	statuses, ended := map[int]int{}, 0
	var mu sync.Mutex
	send := func(path, body string, f fault, limit, late time.Duration) {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		q, err := http.NewRequestWithContext(ctx, "POST", r.url+path, strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		q.Header.Set("Content-Type", "application/json")
		a, err := http.DefaultClient.Do(q)
		if err == nil {
			if f == slow {
				time.Sleep(late)
				_, err = io.ReadFull(a.Body, make([]byte, 10))
			} else {
				_, err = io.Copy(io.Discard, a.Body)
			}
			err = errors.Join(err, a.Body.Close())
		}
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			ended++
			return
		}
		if err != nil {
			t.Error(err)
			return
		}
		if statuses[a.StatusCode]++; (a.StatusCode == 400) != (f == badJSON || f == longPrompt) {
			t.Errorf("%s: status %d", body, a.StatusCode)
		}
	}
	var clients sync.WaitGroup
	// heap is the least memory after some rounds of requests. Graphs keep the values of their last run: the last request of a round is
	// always the same.
	heap := func() uint64 {
		least := uint64(math.MaxUint64)
		for range 12 {
			for range 6 {
				path, body := loadBody(rng, 0, tokens, none)
				clients.Go(func() { send(path, body, none, time.Minute, 0) })
			}
			clients.Wait()
			send("/v1/completions", `{"prompt": "a", "max_tokens": 3}`, none, time.Minute, 0)
			r.settle()
			http.DefaultClient.CloseIdleConnections()
			r.formats.mu.Lock()
			r.formats.kept = nil // schemas have masks of different numbers
			r.formats.mu.Unlock()
			for range 3 {
				runtime.GC()
				time.Sleep(5 * time.Millisecond)
			}
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			least = min(least, m.HeapAlloc)
		}
		return least
	}
	var before, after uint64
	seen := func() bool {
		mu.Lock()
		defer mu.Unlock()
		st := r.engine.Stats()
		return ended >= requests/5 && statuses[200] > 0 && statuses[400] > 0 && statuses[429] > 0 && st.Preempted > 0 && st.SharedTokens > 0
	}
	for i := range reftest.AtLeast(requests, seen) {
		f := gone
		if i%2 == 0 {
			f = fault(rng.IntN(int(faults)))
		}
		limit := time.Minute
		if f == gone {
			limit = time.Duration(rng.Int64N(int64(leaves)))
		}
		path, body := loadBody(rng, i, tokens, f)
		late := time.Duration(rng.IntN(20)) * time.Millisecond
		clients.Go(func() { send(path, body, f, limit, late) })
		if i%12 == 11 {
			clients.Wait()
		}
		if i+1 == requests/10 {
			clients.Wait()
			if requests >= 10000 {
				before = heap()
			}
		}
	}
	clients.Wait()
	if requests >= 10000 {
		after = heap()
	}
	r.settle()
	st := r.engine.Stats()
	t.Logf("%d clients went, statuses %v, %d bytes after a tenth and %d at the end, %+v", ended, statuses, before, after, st)
	if requests >= 10000 && float64(after) > 1.02*float64(before) {
		t.Errorf("%d bytes after a tenth of the requests, and %d at the end", before, after)
	}
	if !seen() || st.Live+st.Waiting > 0 {
		t.Errorf("%d clients went, statuses %v, %+v", ended, statuses, st)
	}
	// Two texts that take the whole cache, by their prompts where steps are slow.
	all := `{"prompt": ["a", "b"], "max_tokens": 127, "logit_bias": {"2": -100}}`
	if gpu != nil {
		all = fmt.Sprintf(`{"prompt": [[%[1]s5], [%[1]s6]], "max_tokens": 4, "logit_bias": {"2": -100}}`, strings.Repeat("9, ", 123))
	}
	status, text, _ := r.do("POST", "/v1/completions", all)
	if now := r.engine.Stats(); status != 200 || now.Preempted != st.Preempted {
		t.Errorf("pages are lost: %d %s, %+v", status, text, now)
	}
	_, text, _ = r.do("GET", "/metrics", "")
	for _, want := range []string{"leanlm_texts 0\n", "# TYPE leanlm_request_seconds histogram\n", `leanlm_requests_total{path="/v1/completions",status="200"} `, "leanlm_first_token_seconds_count "} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %q:\n%s", want, text)
		}
	}
	for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
		if !regexp.MustCompile(`^(# (HELP|TYPE) leanlm_\w+ .*|leanlm_\w+(\{(\w+="[^"]*",?)+\})? [0-9.e+-]+)$`).MatchString(line) {
			t.Errorf("metrics line %q", line)
		}
	}
}
