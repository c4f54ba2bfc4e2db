package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/reftest"
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

// rig is a server of the shipped model.
type rig struct {
	*Server
	t    testing.TB
	url  string
	http *httptest.Server
}

func newRig(t testing.TB, o Options, of decoder.Options) *rig {
	t.Helper()
	m, err := decoder.Open(chatModel(t))
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
	r := &rig{Server: s, t: t, http: httptest.NewServer(s)}
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
func (r *rig) do(method, path, body string, header ...string) (int, string, http.Header) {
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
func (r *rig) post(path, body string, to any) {
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
func (r *rig) events(path, body string) (all []string) {
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
func (r *rig) want(prompt []int, q decoder.Request) (text string, tokens []decoder.Token, reason decoder.Reason) {
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

func (r *rig) ids(text string, o tokenizer.Options) []int {
	r.t.Helper()
	ids, err := r.model.Tokenizer().Encode(text, o)
	if err != nil {
		r.t.Fatal(err)
	}
	return ids
}

// TestCompletions: an answer has the text, the reason, the usage and the probabilities of the engine, as a whole and as a stream.
func TestCompletions(t *testing.T) {
	r := newRig(t, Options{Model: "tiny"}, decoder.Options{})
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
	r := newRig(t, Options{}, decoder.Options{Batch: 4})
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
	r := newRig(t, Options{}, decoder.Options{})
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
	var count struct {
		Count  int   `json:"count"`
		Most   int   `json:"max_model_len"`
		Tokens []int `json:"tokens"`
	}
	r.post("/tokenize", `{"messages": [{"role": "user", "content": "Hello"}]}`, &count)
	if want := r.ids("user: Hello So", tokenizer.Options{Special: true, Bare: true}); !slices.Equal(count.Tokens, want) || count.Count != len(want) || count.Most != 128 {
		t.Errorf("%+v, want %v", count, want)
	}
}

// TestTools: the template has the tools and the calls of a conversation, and calls of an answer are found, as a whole and in a stream.
func TestTools(t *testing.T) {
	r := newRig(t, Options{}, decoder.Options{Context: 256})
	var count struct {
		Count  int   `json:"count"`
		Most   int   `json:"max_model_len"`
		Tokens []int `json:"tokens"`
	}
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
	r := newRig(t, Options{}, decoder.Options{})
	end, _ := r.model.Tokenizer().Special(r.model.Tokenizer().EOS())
	if end == "" {
		t.Fatal("no name")
	}
	var count struct {
		Count  int   `json:"count"`
		Most   int   `json:"max_model_len"`
		Tokens []int `json:"tokens"`
	}
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
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}`, 400, "tools[0].function.strict", "want false"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "tool_choice": "auto"}`, 400, "tool_choice", "does not know"},
	{"/tokenize", `{"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}`, 400, "tools", "messages is missing"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "store": true}`, 400, "store", "want false"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "service_tier": "flex"}`, 400, "service_tier", `want "auto"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}`, 400, "response_format.type", `want "text"`},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}`, 400, "top_logprobs", "logprobs is not true"},
	{"/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 2}`, 400, "max_completion_tokens", "max_tokens is given"},
	{"/tokenize", `{}`, 400, "prompt", "want one of"},
	{"/tokenize", `{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}`, 400, "prompt", "want one of"},
	{"/v1/embeddings", `{}`, 404, "", "there is no path"},
	{"/v1/responses", `{}`, 404, "", "there is no path"},
}

// TestWrongRequests: a wrong request is an error that names the field, before a text begins.
func TestWrongRequests(t *testing.T) {
	r := newRig(t, Options{Texts: 4, Body: 4096}, decoder.Options{})
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

// TestAdmission: keys, hosts and origins.
func TestAdmission(t *testing.T) {
	r := newRig(t, Options{Keys: []string{"one", "two"}, Hosts: []string{"lm.example"}, Origins: []string{"https://page.example"}}, decoder.Options{})
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
	r := newRig(t, Options{}, decoder.Options{})
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

// TestQueue: a full queue is 429, and a client that goes makes room.
func TestQueue(t *testing.T) {
	r := newRig(t, Options{Queue: 1}, decoder.Options{Batch: 1})
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
func (r *rig) settle() {
	r.t.Helper()
	for begin := time.Now(); r.running() > 0; time.Sleep(time.Millisecond) {
		if time.Since(begin) > 20*time.Second {
			r.t.Fatalf("%d texts are left", r.running())
		}
	}
}

// TestTime: a request that takes too long is 504, and a stream ends with the error.
func TestTime(t *testing.T) {
	r := newRig(t, Options{Time: time.Nanosecond}, decoder.Options{})
	if status, text, _ := r.do("POST", "/v1/completions", `{"prompt": "Once", "max_tokens": 100}`); status != 504 || !strings.Contains(text, "too long") {
		t.Errorf("%d %s", status, text)
	}
	status, text, _ := r.do("POST", "/v1/chat/completions", `{"messages": [{"role": "user", "content": "a"}], "stream": true}`)
	if last := strings.TrimSpace(text); status != 200 || !strings.HasSuffix(last, "}") || !strings.Contains(last, `data: {"error":{"message":"the request took too long"`) {
		t.Errorf("%d %s", status, text)
	}
}

// TestShutdown: running requests end by themselves, or with 503 when the time is over; new ones are 503.
func TestShutdown(t *testing.T) {
	for _, patience := range []time.Duration{time.Minute, 0} {
		r := newRig(t, Options{}, decoder.Options{})
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
		if want := map[bool]int{true: 200, false: 503}[patience > 0]; got.status != want && !(patience == 0 && got.status == 200) || (err == nil) != (patience > 0 || err == nil) {
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
	r := newRig(t, Options{}, decoder.Options{BatchInvariant: true, Batch: 8})
	clean := regexp.MustCompile(`"id":"[^"]*"|"created":\d+|"cached_tokens":\d+`)
	ask := func(i int) string {
		_, text, _ := r.do("POST", "/v1/completions", fmt.Sprintf(`{"prompt": "Once upon a time there was number %d", "max_tokens": 12, "seed": %d, "logprobs": 4, "n": 2}`, i, i))
		return clean.ReplaceAllString(text, "")
	}
	const n = 8
	var alone [n]string
	for i := range n {
		alone[i] = ask(i)
	}
	for range reftest.Cases(t, 3, 20) {
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

// TestLoad: after requests of which half are cancelled, nothing is left.
func TestLoad(t *testing.T) {
	r := newRig(t, Options{Queue: 100}, decoder.Options{Batch: 4, Tokens: 200})
	rng := reftest.Rand(t)
	var clients sync.WaitGroup
	for i := range reftest.Cases(t, 60, 2000) {
		limit := time.Duration(rng.IntN(20)) * time.Millisecond
		if i%2 == 0 {
			limit = time.Minute
		}
		body := fmt.Sprintf(`{"prompt": "Once upon %d", "max_tokens": %d, "n": %d, "stream": %v}`, i, 1+rng.IntN(40), 1+rng.IntN(2), rng.IntN(2) == 0)
		clients.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			q, err := http.NewRequestWithContext(ctx, "POST", r.url+"/v1/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			q.Header.Set("Content-Type", "application/json")
			a, err := http.DefaultClient.Do(q)
			if err == nil {
				_, err = io.Copy(io.Discard, a.Body)
				err = errors.Join(err, a.Body.Close())
			}
			if err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
		if i%8 == 7 {
			clients.Wait()
		}
	}
	clients.Wait()
	r.settle()
	_, text, _ := r.do("GET", "/metrics", "")
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

// TestSlowBody: a client that does not send its body is cut off.
func TestSlowBody(t *testing.T) {
	r := newRig(t, Options{Reader: 50 * time.Millisecond}, decoder.Options{})
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
		r := newRig(t, Options{Log: slog.New(slog.NewJSONHandler(&b, nil)), Prompts: prompts, Keys: []string{"secret"}}, decoder.Options{})
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
	r := newRig(f, Options{Body: 1 << 16, Time: 2 * time.Second}, decoder.Options{Context: 32})
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
