package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestAdmission: keys, hosts and origins.
func TestAdmission(t *testing.T) {
	r := newServer(t, Options{Keys: []string{"one", "two"}, Hosts: []string{"lm.example"}, Origins: []string{"https://page.example"}}, decoder.Options{})
	for _, c := range []struct {
		path   string
		header []string
		status int
	}{
		{"/v1/models", nil, 401},
		{"/v1/models", []string{"Authorization", "Bearer three"}, 401},
		{"/v1/models", []string{"Authorization", "Bearer "}, 401},
		{"/v1/models", []string{"Authorization", "one"}, 401},
		{"/v1/models", []string{"Authorization", "Basic one"}, 401},
		{"/v1/models", []string{"Authorization", "Bearer one"}, 200},
		{"/v1/models", []string{"Authorization", "bearer two"}, 200},
		{"/v1/models/default", []string{"Authorization", "Bearer two"}, 200},
		{"/v1/models/other", []string{"Authorization", "Bearer two"}, 404},
		{"/v1/nothing", nil, 401},
		{"/metrics", nil, 401},
		{"/", nil, 401},
		{"/page.js", nil, 401},
		{"/", []string{"Authorization", "Basic OnR3bw=="}, 200},          // :two
		{"/", []string{"Authorization", "Basic OnRocmVl"}, 401},          // :three
		{"/", []string{"Authorization", "Basic dHdvOng="}, 401},          // two:x
		{"/v1/models", []string{"Authorization", "Basic eDpvbmU="}, 200}, // x:one
		{"/health", nil, 200},
		{"/health", []string{"Host", "evil.example"}, 403},
		{"/health", []string{"Host", "evil.example:8080"}, 403},
		{"/health", []string{"Host", "127.0.0.1.evil.example"}, 403},
		{"/health", []string{"Host", "lm.example:80"}, 200},
		{"/health", []string{"Host", "LOCALHOST:80"}, 200},
		{"/health", []string{"Host", "[::1]:80"}, 200},
		{"/health", []string{"Host", "127.8.8.8"}, 200},
		{"/health", []string{"Origin", "https://evil.example"}, 403},
		{"/health", []string{"Origin", "null"}, 403},
		{"/health", []string{"Origin", "https://page.example"}, 200},
		{"/health", []string{"Origin", "http://localhost:9", "Host", "localhost:9"}, 200},
		{"/health", []string{"Origin", "http://localhost:9", "Host", "localhost:8"}, 403},
	} {
		status, text, h := r.do("GET", c.path, "", c.header...)
		if status != c.status {
			t.Errorf("%s %v: %d %s", c.path, c.header, status, text)
		}
		if cors := slices.Contains(c.header, "https://page.example"); cors != (h.Get("Access-Control-Allow-Origin") != "") {
			t.Errorf("%s %v: %v", c.path, c.header, h)
		}
	}
	if status, _, h := r.do("OPTIONS", "/v1/completions", "", "Origin", "https://page.example", "Access-Control-Request-Method", "POST"); status != 204 || h.Get("Access-Control-Allow-Headers") == "" {
		t.Errorf("preflight: %d %v", status, h)
	}
	if status, _, _ := r.do("OPTIONS", "/v1/completions", "", "Origin", "https://evil.example"); status != 403 {
		t.Errorf("preflight of another page: %d", status)
	}
}

// TestPage: the page and its parts are there, with a policy that allows nothing else, and name only paths of the server.
func TestPage(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{})
	for path, kind := range map[string]string{"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"} {
		status, text, h := r.do("GET", path, "")
		if status != 200 || !strings.HasPrefix(h.Get("Content-Type"), kind) || !strings.HasPrefix(h.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'") || len(text) < 500 {
			t.Errorf("%s: %d %v", path, status, h)
		}
	}
	for _, m := range regexp.MustCompile(`(?:url|send)\("([^"]+)"|(?:href|src)="([^"]+)"`).FindAllStringSubmatch(string(pageHTML)+string(pageJS), -1) {
		if _, ok := routes["/"+m[1]+m[2]]; !ok {
			t.Errorf("the page asks for %q", m[1]+m[2])
		}
	}
	_, text, _ := r.do("GET", "/metrics", "")
	for _, m := range regexp.MustCompile(`leanlm_\w+`).FindAllString(string(pageJS), -1) {
		if !strings.Contains(text, "\n"+m+" ") {
			t.Errorf("the page shows %s, which /metrics does not have", m)
		}
	}
	for _, m := range regexp.MustCompile(`\$\("(\w+)"\)`).FindAllStringSubmatch(string(pageJS), -1) {
		if !strings.Contains(string(pageHTML), `id="`+m[1]+`"`) {
			t.Errorf("the page has no element %s", m[1])
		}
	}
}

// TestQueue: a full queue is 429, and a client that goes leaves the queue.
func TestQueue(t *testing.T) {
	r := newServer(t, Options{Queue: 1}, decoder.Options{Batch: 1})
	leave, err := r.enter(1)
	if err != nil {
		t.Fatal(err)
	}
	status, text, h := r.do("POST", "/v1/completions", `{"prompt": "a", "max_tokens": 1, "n": 2}`)
	if status != 429 || h.Get("Retry-After") == "" || !strings.Contains(text, "queue is full: 1 texts run or wait, and the server takes 2") || !strings.Contains(text, "rate_limit_error") {
		t.Errorf("%d %v %s", status, h, text)
	}
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "a", "max_tokens": 1}`); status != 200 {
		t.Errorf("%d %s", status, text)
	}
	leave()
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "a", "max_tokens": 1, "n": 3}`); status != 400 || !strings.Contains(text, "takes 2 at a time") {
		t.Errorf("too many texts: %d %s", status, text)
	}
	for _, stream := range []bool{false, true} {
		ctx, cancel := context.WithCancel(context.Background())
		q, err := http.NewRequestWithContext(ctx, "POST", r.url+"/v1/completions", strings.NewReader(fmt.Sprintf(`{"prompt": "Once", "n": 2, "max_tokens": 100, "stream": %v, "logit_bias": {"2": -100}}`, stream)))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/json")
		var client sync.WaitGroup
		client.Go(func() {
			if a, err := http.DefaultClient.Do(q); err == nil {
				_, _ = io.Copy(io.Discard, a.Body) // the client goes
				a.Body.Close()
			}
		})
		for r.running() == 0 && r.engine.Stats().Steps < 10 {
			time.Sleep(100 * time.Microsecond)
		}
		cancel()
		client.Wait()
		r.settle()
	}
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "a", "max_tokens": 1, "n": 2}`); status != 200 {
		t.Errorf("%d %s", status, text)
	}
}

// settle waits until no text runs.
func (r *testServer) settle() {
	r.t.Helper()
	for begin := time.Now(); r.running() > 0; time.Sleep(time.Millisecond) {
		if time.Since(begin) > 20*time.Second {
			r.t.Fatalf("%d texts are left", r.running())
		}
	}
}

// TestTime: a request that takes too long is 504, and a stream ends with the error.
func TestTime(t *testing.T) {
	r := newServer(t, Options{Time: time.Nanosecond}, decoder.Options{})
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "Once", "max_tokens": 100}`); status != 504 || !strings.Contains(text, "too long") {
		t.Errorf("%d %s", status, text)
	}
	slow := newServer(t, Options{}, decoder.Options{Context: 2000})
	if status, text, _ := slow.do("POST", "/v1/completions", `{"prompt": "Once", "max_tokens": 1900, "timeout": 0.001, "priority": -3, "logit_bias": {"2": -100}}`); status != 504 || !strings.Contains(text, "too long") {
		t.Errorf("timeout: %d %s", status, text)
	}
	late, cancel := context.WithDeadline(context.Background(), time.Now())
	defer cancel()
	q := httptest.NewRequest("POST", "http://localhost/v1/completions", strings.NewReader(`{"prompt": "Once"}`)).WithContext(late)
	q.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	if slow.ServeHTTP(w, q); w.Code != 504 {
		t.Errorf("a deadline of the caller: %d %s", w.Code, w.Body)
	}
	status, text, _ := r.do("POST", "/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "stream": true}`)
	if last := strings.TrimSpace(text); status != 200 || !strings.HasSuffix(last, "}") || !strings.Contains(last, `data: {"error":{"message":"the request took too long"`) {
		t.Errorf("%d %s", status, text)
	}
}

// TestPin: tokens of a system message, and of what begins prompts, are in the cache for later requests.
func TestPin(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{Context: 128, Tokens: 512})
	const system = "You are an old king, and you know where each key and each ship of the country is."
	if err := r.Pin(context.Background(), system); err != nil {
		t.Fatal(err)
	}
	var c chatCompletion
	r.post("/v1/chat/completions", `{"messages": [{"role": "system", "content": "`+system+`"}, {"role": "user", "content": "Where?"}], "max_tokens": 2}`, &c)
	if n := len(r.ids(system, tokenizer.Options{})); c.Usage.Details.Cached < n {
		t.Errorf("%+v, and the message has %d tokens", c.Usage, n)
	}
	if err := r.Pin(context.Background(), "Be."); !errors.Is(err, decoder.ErrConfig) {
		t.Errorf("a short message: %v", err)
	}
	r.templates = nil
	if err := r.Pin(context.Background(), "Once upon a time there was a king in a far country, who had"); err != nil {
		t.Fatal(err)
	}
	var x completion
	r.post("/v1/completions", `{"prompt": "Once upon a time there was a king in a far country, who had three daughters", "max_tokens": 2}`, &x)
	if x.Usage.Details.Cached < 13 {
		t.Errorf("%+v", x.Usage)
	}
}

// TestShutdown: running requests end by themselves, or with 503 when the time is over; new ones are 503.
func TestShutdown(t *testing.T) {
	for _, patience := range []time.Duration{time.Minute, 0} {
		r := newServer(t, Options{}, decoder.Options{})
		type result struct {
			status int
			text   string
		}
		results := make(chan result, 1)
		go func() {
			status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "Once", "max_tokens": 100, "logit_bias": {"2": -100}}`)
			results <- result{status, text}
		}()
		for r.running() == 0 {
			time.Sleep(time.Millisecond)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := r.Shutdown(ctx)
		cancel()
		got := <-results
		// Without patience the request may still have ended by itself.
		if ended := got.status == 200; !ended && (patience > 0 || got.status != 503) || patience > 0 && err != nil || !ended && err == nil {
			t.Errorf("patience %v: %d %s, %v", patience, got.status, got.text, err)
		}
		if status, text, h := r.do("POST", "/v1/completions", `{"prompt": "a"}`); status != 503 || h.Get("Retry-After") == "" {
			t.Errorf("a request after it: %d %s", status, text)
		}
		if status, _, _ := r.do("GET", "/health", ""); status != 503 {
			t.Errorf("health is %d", status)
		}
	}
}

// TestNeighbours: with batch invariance, an answer has the same bytes alone and beside others, but for the identity.
func TestNeighbours(t *testing.T) {
	r := newServer(t, Options{Queue: 200}, decoder.Options{BatchInvariant: true, Batch: 64, Tokens: 4000})
	clean := regexp.MustCompile(`"id":"[^"]*"|"created":\d+|"cached_tokens":\d+`)
	ask := func(i int) string {
		_, text, _ := r.do("POST", "/v1/completions", fmt.Sprintf(`{"prompt": "Once upon a time there was number %d", "max_tokens": 12, "seed": %d, "logprobs": 4, "n": 2}`, i, i))
		return clean.ReplaceAllString(text, "")
	}
	n := reftest.Cases(t, 8, 64)
	alone := make([]string, n)
	for i := range n {
		alone[i] = ask(i)
	}
	for range reftest.Cases(t, 3, 100) {
		var clients sync.WaitGroup
		for i := range n {
			clients.Go(func() {
				if got := ask(i); got != alone[i] {
					t.Errorf("request %d:\n%s\nalone:\n%s", i, got, alone[i])
				}
			})
		}
		clients.Wait()
	}
}

// TestSlowBody: a client that does not send its body is cut off.
func TestSlowBody(t *testing.T) {
	r := newServer(t, Options{Reader: 50 * time.Millisecond}, decoder.Options{})
	in, out := io.Pipe()
	defer out.Close()
	q, err := http.NewRequest("POST", r.url+"/v1/completions", in)
	if err != nil {
		t.Fatal(err)
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return // the connection is closed
	}
	defer a.Body.Close()
	if a.StatusCode != 400 {
		t.Errorf("status %d", a.StatusCode)
	}
}

// TestLog: a line for each request, without prompts unless asked.
func TestLog(t *testing.T) {
	for _, prompts := range []bool{false, true} {
		var b bytes.Buffer
		r := newServer(t, Options{Log: slog.New(slog.NewJSONHandler(&b, nil)), Prompts: prompts, Keys: []string{"secret"}}, decoder.Options{})
		r.do("POST", "/v1/completions", `{"prompt": "hush", "max_tokens": 1}`, "Authorization", "Bearer secret")
		r.http.Close() // waits for the handler
		var line map[string]any
		if err := json.Unmarshal(b.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line["path"] != "/v1/completions" || line["status"] != 200.0 || strings.Contains(b.String(), "hush") != prompts || strings.Contains(b.String(), "secret") {
			t.Errorf("%s", b.String())
		}
	}
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    Options
		text string
	}{{Options{Queue: -1}, "Queue -1"}, {Options{Keys: []string{""}}, "key is empty"}, {Options{Prompts: true}, "Prompts"}} {
		if err := c.o.fill(); !errors.Is(err, decoder.ErrConfig) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %v", c.o, err)
		}
	}
}

// FuzzServe: no body and no header panics, and each answer is JSON or a stream.
func FuzzServe(f *testing.F) {
	r := newServer(f, Options{Body: 1 << 16, Time: 2 * time.Second}, decoder.Options{Context: 32})
	for _, c := range wrongRequests {
		f.Add(c.path, c.body, "localhost", "")
	}
	f.Add("/v1/completions", `{"prompt": "a", "max_tokens": 2, "stream": true}`, "127.0.0.1:80", "http://127.0.0.1:80")
	f.Add("/v1/chat/completions", `{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}], "max_tokens": 1}`, "[::1]", "null")
	f.Fuzz(func(t *testing.T, path, body, host, origin string) {
		q := httptest.NewRequest("POST", "/", strings.NewReader(body))
		q.URL.Path, q.Host = path, host
		q.Header.Set("Origin", origin)
		q.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		r.ServeHTTP(w, q)
		switch kind := w.Header().Get("Content-Type"); {
		case kind == "application/json" && json.Valid(w.Body.Bytes()):
		case kind == "text/event-stream" && strings.HasPrefix(w.Body.String(), "data: "):
		default:
			t.Errorf("%d %q %q", w.Code, kind, w.Body.String())
		}
	})
}
