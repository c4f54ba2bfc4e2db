package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const template = "{% for t in tools or [] %}{{ t | tojson }} {% endfor %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% if m['content'] == 'raise' %}{{ raise_exception('it says raise') }}{% endif %}{% endfor %}" +
	"{% if add_generation_prompt %}So{% endif %}"

// chatModel writes the shipped model with a chat template to a folder.
func chatModel(t testing.TB) (dir string) {
	t.Helper()
	dir = t.TempDir()
	err := os.CopyFS(dir, tiny.Files)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// tokenized is the answer of /tokenize.
type tokenized struct {
	Count  int   `json:"count"`
	Most   int   `json:"max_model_len"`
	Tokens []int `json:"tokens"`
}

// testServer is a server of the shipped model.
type testServer struct {
	*Server
	t    testing.TB
	url  string
	http *httptest.Server
}

func newServer(t testing.TB, o Options, of decoder.Options) *testServer {
	t.Helper()
	return serverOf(t, chatModel(t), o, of)
}

func serverOf(t testing.TB, dir string, o Options, of decoder.Options) *testServer {
	t.Helper()
	m, err := decoder.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if of.Context == 0 {
		of.Context = 128
	}
	e, err := m.Engine(of)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(m, e, o)
	if err != nil {
		t.Fatal(err)
	}
	r := &testServer{Server: s, t: t, http: httptest.NewServer(s)}
	r.url = r.http.URL
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		r.http.Close()
		http.DefaultClient.CloseIdleConnections()
		if err := errors.Join(e.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	return r
}

// do sends a request and returns the status and the body.
func (r *testServer) do(method, path, body string, header ...string) (int, string, http.Header) {
	r.t.Helper()
	q, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if body != "" {
		q.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		if q.Header.Set(header[i], header[i+1]); header[i] == "Host" {
			q.Host = header[i+1]
		}
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		r.t.Fatal(err)
	}
	defer a.Body.Close()
	data, err := io.ReadAll(a.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return a.StatusCode, string(data), a.Header
}

// post posts a body, and decodes the answer strictly into to.
func (r *testServer) post(path, body string, to any) {
	r.t.Helper()
	status, answer, _ := r.do("POST", path, body)
	if status != 200 {
		r.t.Fatalf("%s: %d %s", body, status, answer)
	}
	strict(r.t, answer, to)
}

func strict(t testing.TB, text string, to any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// events posts a body, and returns the events of the stream. The last one is [DONE].
func (r *testServer) events(path, body string) (all []string) {
	r.t.Helper()
	status, text, header := r.do("POST", path, body)
	if status != 200 || header.Get("Content-Type") != "text/event-stream" {
		r.t.Fatalf("%s: %d %s", body, status, text)
	}
	s := bufio.NewScanner(strings.NewReader(text))
	for s.Scan() {
		if line, ok := strings.CutPrefix(s.Text(), "data: "); ok {
			all = append(all, line)
		} else if s.Text() != "" {
			r.t.Fatalf("line %q", s.Text())
		}
	}
	return all
}

// want is what the engine continues a prompt with.
func (r *testServer) want(prompt []int, q decoder.Request) (text string, tokens []decoder.Token, reason decoder.Reason) {
	r.t.Helper()
	q.Prompt = prompt
	x, err := r.engine.Start(context.Background(), q)
	if err != nil {
		r.t.Fatal(err)
	}
	for token, err := range x.Tokens() {
		if err != nil {
			r.t.Fatal(err)
		}
		tokens = append(tokens, token)
		text += token.Text
	}
	return text, tokens, x.Reason()
}

func (r *testServer) ids(text string, o tokenizer.Options) []int {
	r.t.Helper()
	ids, err := r.model.Tokenizer().Encode(text, o)
	if err != nil {
		r.t.Fatal(err)
	}
	return ids
}

// TestCompletions: an answer has the text, the reason, the usage and the probabilities of the engine, as a whole and as a stream.
func TestCompletions(t *testing.T) {
	r := newServer(t, Options{Model: "tiny"}, decoder.Options{})
	prompt := r.ids("Once upon a time", tokenizer.Options{})
	sampling := decoder.Sampling{Temperature: 0.8, TopP: 0.9, Seed: 7, PresencePenalty: 0.5, LogitBias: map[int]float64{5: -3}}
	text, tokens, _ := r.want(prompt, decoder.Request{Tokens: 12, Sampling: sampling, LogProbs: 3})
	body := `{"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5,
		"logit_bias": {"5": -3}, "logprobs": 3, "user": "somebody", "stop": null`
	var c completion
	r.post("/v1/completions", body+"}", &c)
	if len(c.Choices) != 1 || c.Choices[0].Text != text || *c.Choices[0].FinishReason != "length" || c.Object != "text_completion" || c.Model != "tiny" {
		t.Errorf("%+v, want %q", c, text)
	}
	if u := c.Usage; u.Prompt != len(prompt) || u.Completion != 12 || u.Total != len(prompt)+12 {
		t.Errorf("%+v", u)
	}
	l := c.Choices[0].LogProbs
	offset := 0
	for i, token := range tokens[:12] {
		if l.Tokens[i] != r.tokenText(token.ID) || l.TokenLogProbs[i] != token.LogProb || l.TextOffset[i] != offset {
			t.Errorf("token %d: %q %v %d, want %v at %d", i, l.Tokens[i], l.TokenLogProbs[i], l.TextOffset[i], token, offset)
		}
		for _, x := range token.Likely {
			if p, ok := l.TopLogProbs[i][r.tokenText(x.ID)]; !ok || p < x.LogProb {
				t.Errorf("token %d: %v lack %v", i, l.TopLogProbs[i], x)
			}
		}
		offset += len(token.Text)
	}
	all := r.events("/v1/completions", body+`, "stream": true, "stream_options": {"include_usage": true}}`)
	if all[len(all)-1] != "[DONE]" {
		t.Errorf("the stream ends with %s", all[len(all)-1])
	}
	joined, n, offset := "", 0, 0
	for i, e := range all[:len(all)-1] {
		var c completion
		strict(t, e, &c)
		if i == len(all)-2 {
			if len(c.Choices) != 0 || c.Usage.Completion != 12 {
				t.Errorf("usage: %s", e)
			}
			break
		}
		if x := c.Choices[0].LogProbs; x != nil {
			if x.TextOffset[0] != offset {
				t.Errorf("offset %d, want %d", x.TextOffset[0], offset)
			}
			n += len(x.Tokens)
		}
		joined += c.Choices[0].Text
		offset += len(c.Choices[0].Text)
		if (c.Choices[0].FinishReason != nil) != (i == len(all)-3) {
			t.Errorf("event %d: %s", i, e)
		}
	}
	if joined != text || n != 12 {
		t.Errorf("%q of %d tokens, want %q", joined, n, text)
	}
}

// TestChoices: choices of several prompts have their own seeds and indices; best_of takes the likeliest; stop ends a text.
func TestChoices(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{Batch: 4})
	a, b := r.ids("Once upon a time", tokenizer.Options{}), r.ids("The king", tokenizer.Options{})
	want := func(prompt []int, seed uint64) (string, float64) {
		text, tokens, _ := r.want(prompt, decoder.Request{Tokens: 8, Sampling: decoder.Sampling{Temperature: 1, Seed: seed}, LogProbs: 1})
		sum := 0.0
		for _, x := range tokens {
			sum += x.LogProb
		}
		return text, sum / float64(len(tokens))
	}
	var c completion
	list, err := json.Marshal([][]int{a, b})
	if err != nil {
		t.Fatal(err)
	}
	for _, prompt := range []string{`["Once upon a time", "The king"]`, string(list)} {
		r.post("/v1/completions", fmt.Sprintf(`{"prompt": %s, "max_tokens": 8, "temperature": 1, "seed": 3, "n": 3}`, prompt), &c)
		if len(c.Choices) != 6 {
			t.Fatalf("%d choices", len(c.Choices))
		}
		for i, x := range c.Choices {
			if text, _ := want([][]int{a, b}[i/3], 3+uint64(i%3)); x.Text != text || x.Index != i {
				t.Errorf("choice %d: %+v, want %q", i, x, text)
			}
		}
	}
	type best struct {
		text string
		mean float64
	}
	var all []best
	for i := range 5 {
		text, mean := want(a, 3+uint64(i))
		all = append(all, best{text, mean})
	}
	slices.SortStableFunc(all, func(x, y best) int { return int(math.Copysign(1, y.mean-x.mean)) })
	r.post("/v1/completions", `{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 1, "seed": 3, "n": 2, "best_of": 5}`, &c)
	if len(c.Choices) != 2 || c.Choices[0].Text != all[0].text || c.Choices[1].Text != all[1].text || c.Choices[1].LogProbs != nil {
		t.Errorf("%+v, want %v", c.Choices, all[:2])
	}
	whole, _ := want(a, 3)
	word := strings.Fields(whole)[2]
	before, _, _ := strings.Cut(whole, word)
	for _, stop := range []string{`"` + word + `"`, `["` + word + `", "nothing like this"]`} {
		r.post("/v1/completions", `{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 1, "seed": 3, "stop": `+stop+`}`, &c)
		if c.Choices[0].Text != before || *c.Choices[0].FinishReason != "stop" {
			t.Errorf("%q, %s, want %q", c.Choices[0].Text, *c.Choices[0].FinishReason, before)
		}
	}
	joined := make([]string, 3)
	for _, e := range r.events("/v1/completions", `{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 1, "seed": 3, "n": 3, "stream": true}`) {
		if e == "[DONE]" {
			break
		}
		var c completion
		strict(t, e, &c)
		joined[c.Choices[0].Index] += c.Choices[0].Text
	}
	for i := range joined {
		if text, _ := want(a, 3+uint64(i)); joined[i] != text {
			t.Errorf("stream %d: %q, want %q", i, joined[i], text)
		}
	}
}

// TestChat: a conversation is rendered by the template; an answer is the same as a whole and as a stream.
func TestChat(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{})
	prompt := r.ids("system: Be kind. user: Hello king assistant: Yes? user: Go on So", tokenizer.Options{Special: true, Bare: true})
	text, tokens, _ := r.want(prompt, decoder.Request{Tokens: 10, Ends: r.ends, LogProbs: 2})
	body := `{"messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "king"}], "name": "I"},
		{"role": "assistant", "content": "Yes?", "refusal": null}, {"role": "user", "content": "Go on"}], "max_completion_tokens": 10, "temperature": 0, "logprobs": true, "top_logprobs": 2,
		"response_format": {"type": "text"}, "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "parallel_tool_calls": true`
	var c chatCompletion
	r.post("/v1/chat/completions", body+"}", &c)
	x := c.Choices[0]
	if *x.Message.Content != text || x.Message.Role != "assistant" || *x.FinishReason != "length" || c.Usage.Prompt != len(prompt) || c.Object != "chat.completion" {
		t.Errorf("%+v, %+v, want %q", x, c.Usage, text)
	}
	for i, p := range x.LogProbs.Content {
		if !(math.Abs(p.LogProb-tokens[i].LogProb) < 1e-3) || len(p.Top) != 2 || p.Top[0].Token != r.tokenText(tokens[i].Likely[0].ID) || len(p.Bytes) != len(p.Token) {
			t.Errorf("token %d: %+v", i, p)
		}
	}
	joined, n := "", 0
	all := r.events("/v1/chat/completions", body+`, "stream": true}`)
	for i, e := range all[:len(all)-1] {
		var c chatCompletion
		strict(t, e, &c)
		x := c.Choices[0]
		if (x.Delta.Role == "assistant") != (i == 0) || c.Object != "chat.completion.chunk" || c.Usage != nil || (x.FinishReason != nil) != (i == len(all)-2) {
			t.Errorf("event %d: %s", i, e)
		}
		if x.Delta.Content != nil {
			joined += *x.Delta.Content
		}
		if x.LogProbs != nil {
			n += len(x.LogProbs.Content)
		}
	}
	if joined != text || n != 10 {
		t.Errorf("%q of %d tokens, want %q", joined, n, text)
	}
	var count tokenized
	r.post("/tokenize", `{"messages": [{"role": "user", "content": "Hello"}]}`, &count)
	if want := r.ids("user: Hello So", tokenizer.Options{Special: true, Bare: true}); !slices.Equal(count.Tokens, want) || count.Count != len(want) || count.Most != 128 {
		t.Errorf("%+v, want %v", count, want)
	}
}

// TestTools: the template has the tools and the calls of a conversation, and calls of an answer are found, as a whole and in a stream.
func TestTools(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{Context: 256})
	var count tokenized
	r.post("/tokenize", `{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
		{"role": "tool", "tool_call_id": "c", "content": "5"}], "tools": [{"type": "function", "function": {"name": "f", "description": "adds", "parameters": {"type": "object"}}}]}`, &count)
	want := `{"type": "function", "function": {"name": "f", "description": "adds", "parameters": {"type": "object"}}} user: Hi assistant:  tool: 5 So`
	if got := r.model.Tokenizer().Decode(count.Tokens); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	tools := []json.RawMessage{json.RawMessage(`{"type": "function", "function": {"name": "f"}}`)}
	for _, c := range []struct {
		answer, content string
		calls           int
	}{
		{"Hello {there} <you> [x]", "Hello {there} <you> [x]", 0},
		{"Well.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", "Well.", 1},
		{`[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"b": "}"}}]`, "", 2},
		{`<tool_call>{"name": "g", "arguments": {}}</tool_call>`, `<tool_call>{"name": "g", "arguments": {}}</tool_call>`, 0},
	} {
		for each := 1; each < 12; each++ {
			var u unsent
			text, calls := "", []chat.ToolCall(nil)
			for rest := c.answer; ; {
				p := piece{text: rest[:min(each, len(rest))]}
				if rest = rest[len(p.text):]; rest == "" {
					p.finish = &finishStop
				}
				var more string
				more, calls = u.add(&p, tools)
				if text += more; p.finish != nil {
					break
				}
			}
			if text != c.content || len(calls) != c.calls {
				t.Errorf("%q in pieces of %d: %q and %d calls, want %q and %d", c.answer, each, text, len(calls), c.content, c.calls)
			}
			for i, x := range toolCalls(calls, true) {
				if *x.Index != i || len(x.ID) != 9 || x.Type != "function" || x.Function.Name != "f" || !json.Valid([]byte(x.Function.Arguments)) {
					t.Errorf("call %d: %+v", i, x)
				}
			}
		}
	}
	asked := `{"messages": [{"role": "user", "content": "Hello"}], "tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 12, "temperature": 0`
	var whole chatCompletion
	r.post("/v1/chat/completions", asked+"}", &whole)
	joined := ""
	for _, e := range r.events("/v1/chat/completions", asked+`, "stream": true}`) {
		if e == "[DONE]" {
			break
		}
		var c chatCompletion
		strict(t, e, &c)
		if x := c.Choices[0].Delta.Content; x != nil {
			joined += *x
		}
	}
	if joined != *whole.Choices[0].Message.Content || joined == "" {
		t.Errorf("%q, want %q", joined, *whole.Choices[0].Message.Content)
	}
}

// TestSpecialNames: the name of a special token is text in a prompt and in a message.
func TestSpecialNames(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{})
	end, _ := r.model.Tokenizer().Special(r.model.Tokenizer().EOS())
	if end == "" {
		t.Fatal("no name")
	}
	var count tokenized
	for _, text := range []string{"a " + end + " b", end, end + end, end[:1] + end + end[1:], "\uE000" + end} {
		body, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		for _, form := range []string{`{"prompt": %s}`, `{"messages": [{"role": "user", "content": %s}]}`} {
			r.post("/tokenize", fmt.Sprintf(form, body), &count)
			special := 0
			for i, id := range count.Tokens {
				if _, ok := r.model.Tokenizer().Special(id); ok && i > 0 { // the tokenizer begins a prompt with one
					special++
				}
			}
			if special > 0 {
				t.Errorf("%s of %q: %v", form, text, count.Tokens)
			}
			if got := r.model.Tokenizer().Decode(count.Tokens); !strings.Contains(got, text) {
				t.Errorf("%s of %q is %q", form, text, got)
			}
		}
	}
}

// wrongRequests are requests that are errors, with the status, and a part of the text.
var wrongRequests = []struct {
	path, body string
	status     int
	param      string
	text       string
}{
	{"/v1/completions", ``, 415, "", "Content-Type"},
	{"/v1/completions", `{`, 400, "", "ends early"},
	{"/v1/completions", `[]`, 400, "", "begins with ["},
	{"/v1/completions", `{} {}`, 400, "", "something follows"},
	{"/v1/completions", `{}`, 400, "prompt", "missing"},
	{"/v1/completions", `{"prompt": "a", "frobnicate": 1}`, 400, "frobnicate", "does not know"},
	{"/v1/completions", `{"prompt": "a", "Stream": true}`, 400, "Stream", "does not know"},
	{"/v1/completions", `{"prompt": "a", "prompt": "b"}`, 400, "prompt", "twice"},
	{"/v1/completions", `{"prompt": "a", "echo": true}`, 400, "echo", "does not know"},
	{"/v1/completions", `{"prompt": "a", "suffix": "b"}`, 400, "suffix", "does not know"},
	{"/v1/completions", `{"prompt": 5}`, 400, "prompt", "no text"},
	{"/v1/completions", `{"prompt": []}`, 400, "prompt", "not empty"},
	{"/v1/completions", `{"prompt": [[]]}`, 400, "prompt", "has no tokens"},
	{"/v1/completions", `{"prompt": [-1]}`, 400, "prompt", "token -1"},
	{"/v1/completions", `{"prompt": [1000000]}`, 400, "prompt", "token 1000000"},
	{"/v1/completions", `{"prompt": ["a","a","a","a","a"]}`, 400, "prompt", "5 prompts"},
	{"/v1/completions", `{"prompt": "` + strings.Repeat("word ", 200) + `"}`, 400, "prompt", "the context has"},
	{"/v1/completions", `{"prompt": "a", "model": "gpt-5"}`, 404, "model", `there is no "gpt-5"`},
	{"/v1/completions", `{"prompt": "a", "temperature": 3}`, 400, "temperature", "3 is not in [0, 2]"},
	{"/v1/completions", `{"prompt": "a", "temperature": "hot"}`, 400, "temperature", "no number"},
	{"/v1/completions", `{"prompt": "a", "n": 0}`, 400, "n", "0 is not in [1, 4]"},
	{"/v1/completions", `{"prompt": "a", "n": 1.5}`, 400, "n", "no whole number"},
	{"/v1/completions", `{"prompt": "a", "max_tokens": 0}`, 400, "max_tokens", "not in"},
	{"/v1/completions", `{"prompt": "a", "n": 2, "best_of": 1}`, 400, "best_of", "less than n"},
	{"/v1/completions", `{"prompt": "a", "best_of": 2, "stream": true}`, 400, "best_of", "stream"},
	{"/v1/completions", `{"prompt": "a", "logprobs": 21}`, 400, "logprobs", "not in"},
	{"/v1/completions", `{"prompt": "a", "logit_bias": {"x": 1}}`, 400, "logit_bias", "no token"},
	{"/v1/completions", `{"prompt": "a", "logit_bias": {"5": 101}}`, 400, "logit_bias", "[-100, 100]"},
	{"/v1/completions", `{"prompt": "a", "stop": ""}`, 400, "stop", "empty"},
	{"/v1/completions", `{"prompt": "a", "stop": 5}`, 400, "stop", "no text"},
	{"/v1/completions", `{"prompt": "a", "stream_options": {"include_usage": true}}`, 400, "stream_options", "no stream"},
	{"/v1/completions", `{"prompt": "a", "stream": true, "stream_options": {"usage": true}}`, 400, "stream_options.usage", "does not know"},
	{"/v1/chat/completions", `{}`, 400, "messages", "missing"},
	{"/v1/chat/completions", `{"messages": []}`, 400, "messages", "empty"},
	{"/v1/chat/completions", `{"messages": [{"role": "user"}]}`, 400, "messages[0]", "content is missing"},
	{"/v1/chat/completions", `{"messages": [{"content": "a"}]}`, 400, "messages[0]", "role is missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "king", "content": "a"}]}`, 400, "messages[0].role", `"king" is none of`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a", "mood": 1}]}`, 400, "messages[0].mood", "does not know"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}`, 400, "messages[0].content", `part 0 is of type "image_url"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}`, 400, "messages[0]", "no tool_calls"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "raise"}]}`, 400, "messages", "it says raise"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}`, 400, "prompt", "does not know"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": []}`, 400, "tools", "empty"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}`, 400, "tools[0]", "function.name is missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "custom", "function": {"name": "f"}}]}`, 400, "tools[0].type", `want "function"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}`, 400, "tools[0].function.strict", "tool_choice"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}`, 400, "tools[0].function.strict", "true or false"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tool_choice": "auto"}`, 400, "tool_choice", "no tools"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]}`, 400, "tools[1].function.name", "given twice"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "b"}}}}}]}`, 400, "tools", "#/properties/a/pattern"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "any"}`, 400, "tool_choice", `"any" is none of auto, none, required`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function"}}`, 400, "tool_choice", "function.name is missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}`, 400, "tool_choice", `no function "g"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "allowed_tools"}}`, 400, "tool_choice.type", `want "function"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "stop": "a"}`, 400, "stop", "would cut"},
	{"/tokenize", `{"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}`, 400, "tools", "messages is missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "store": true}`, 400, "store", "want false"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "service_tier": "flex"}`, 400, "service_tier", `want "auto"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}`, 400, "response_format.type", "none of text, json_object, json_schema"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}`, 400, "response_format.json_schema", "needs it"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "text", "json_schema": {}}}`, 400, "response_format.json_schema", "for type json_schema"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}`, 400, "response_format.json_schema.name", "missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}`, 400, "response_format.json_schema.schema", "missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"pattern": "b"}}}}}}`, 400, "response_format.json_schema.schema", "#/properties/a/pattern: keyword"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}, "stop": "b"}`, 400, "stop", "response_format asks for JSON"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {"name": "f"}}]}`, 400, "response_format", "tools are given, too"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}`, 400, "top_logprobs", "logprobs is not true"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 2}`, 400, "max_completion_tokens", "max_tokens is given"},
	{"/tokenize", `{}`, 400, "prompt", "want one of"},
	{"/tokenize", `{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}`, 400, "prompt", "want one of"},
	{"/v1/completions", `{"prompt": "a", "priority": 0.5}`, 400, "priority", "whole number"},
	{"/v1/completions", `{"prompt": "a", "timeout": 0}`, 400, "timeout", "not in [0.001, 600]"},
	{"/v1/embeddings", `{}`, 404, "", "there is no path"},
	{"/v1/responses", `{}`, 404, "", "there is no path"},
}

// TestWrongRequests: a wrong request is an error that names the field, before a text begins.
func TestWrongRequests(t *testing.T) {
	r := newServer(t, Options{Texts: 4, Body: 4096}, decoder.Options{})
	type failure struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    *string `json:"code"`
		} `json:"error"`
	}
	for _, c := range wrongRequests {
		status, text, _ := r.do("POST", c.path, c.body)
		var f failure
		strict(t, text, &f)
		param := ""
		if f.Error.Param != nil {
			param = *f.Error.Param
		}
		if status != c.status || param != c.param || !strings.Contains(f.Error.Message, c.text) || f.Error.Type != "invalid_request_error" {
			t.Errorf("%s %s: %d %s", c.path, short(c.body), status, text)
		}
	}
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "`+strings.Repeat("a", 5000)+`"}`); status != 413 || !strings.Contains(text, "more than 4096 bytes") {
		t.Errorf("a long body: %d %s", status, text)
	}
	if status, text, h := r.do("GET", "/v1/completions", ""); status != 405 || h.Get("Allow") != "POST" {
		t.Errorf("GET: %d %s", status, text)
	}
	if n := r.engine.Stats().Steps; n != 0 {
		t.Errorf("%d steps", n)
	}
}
