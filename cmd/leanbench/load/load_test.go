package load

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/serve"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

// newServer serves the shipped model with a chat template.
func newServer(t *testing.T) (url string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, tiny.Files); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte("{% for m in messages %}{{ m['content'] }} {% endfor %}So"), 0o666); err != nil {
		t.Fatal(err)
	}
	m, err := decoder.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	e, err := m.Engine(decoder.Options{Context: 256})
	if err != nil {
		t.Fatal(err)
	}
	s, err := serve.New(m, e, serve.Options{Keys: []string{"key"}})
	if err != nil {
		t.Fatal(err)
	}
	h := httptest.NewServer(s)
	t.Cleanup(func() {
		err := s.Shutdown(context.Background())
		h.Close()
		if err := errors.Join(err, e.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	return h.URL + "/v1"
}

// TestLoad: the command measures a server, and writes the figures.
func TestLoad(t *testing.T) {
	url, file := newServer(t), filepath.Join(t.TempDir(), "load.json")
	flags := flag.NewFlagSet("load", flag.ContinueOnError)
	run := setup(flags)
	if err := flags.Parse([]string{"-at", "lean=" + url, "-at", "again=" + url, "-key", "key", "-clients", "1,3", "-rounds", "2", "-requests", "2", "-words", "10", "-tokens", "8", "-never", "2", "-json", file}); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run(&out, &out); err != nil {
		t.Fatal(err)
	}
	r, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Figures) != 2*2*4 {
		t.Errorf("%d figures", len(r.Figures))
	}
	for _, f := range r.Figures {
		if !(f.Value > 0) || !strings.Contains(f.Case, "10 words, 8 tokens") {
			t.Errorf("%+v", f)
		}
	}
	for _, args := range [][]string{{}, {"-at", "lean=" + url, "-tokens", "1"}, {"-at", "lean=" + url, "-clients", "x"}, {"-at", "lean=" + url, "-key", "wrong"}, {"-at", "lean=" + url, "-key", "key", "-model", "other"}} {
		flags := flag.NewFlagSet("load", flag.ContinueOnError)
		run := setup(flags)
		if err := flags.Parse(args); err != nil {
			t.Fatal(err)
		}
		if err := run(&out, &out); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

// TestClient: answers, streams and errors of package serve are what a client library reads.
func TestClient(t *testing.T) {
	config := openai.DefaultConfig("key")
	config.BaseURL = newServer(t)
	c, ctx := openai.NewClientWithConfig(config), t.Context()
	models, err := c.ListModels(ctx)
	if err != nil || len(models.Models) != 1 || models.Models[0].ID != "default" {
		t.Fatalf("%+v, %v", models, err)
	}
	one, err := c.CreateCompletion(ctx, openai.CompletionRequest{Model: "default", Prompt: "Once upon a time", MaxTokens: 5, N: 2, LogProbs: 3})
	if err != nil || len(one.Choices) != 2 || len(one.Choices[1].LogProbs.Tokens) != 5 || one.Usage.CompletionTokens != 10 {
		t.Errorf("%+v, %v", one, err)
	}
	seed := 3
	ask := openai.ChatCompletionRequest{Model: "default", Seed: &seed, MaxCompletionTokens: 6, LogProbs: true, TopLogProbs: 2, Messages: []openai.ChatCompletionMessage{{Role: openai.ChatMessageRoleDeveloper, Content: "A story."}, {Role: "user", Content: "Go on"}}}
	answer, err := c.CreateChatCompletion(ctx, ask)
	if err != nil || len(answer.Choices) != 1 || answer.Choices[0].FinishReason != openai.FinishReasonLength || len(answer.Choices[0].LogProbs.Content) != 6 {
		t.Fatalf("%+v, %v", answer, err)
	}
	stream, err := c.CreateChatCompletionStream(ctx, ask)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	text := ""
	for {
		e, err := stream.Recv()
		if err != nil {
			break
		}
		text += e.Choices[0].Delta.Content
	}
	if text != answer.Choices[0].Message.Content {
		t.Errorf("%q, want %q", text, answer.Choices[0].Message.Content)
	}
	ask.Temperature = 5
	var wrong *openai.APIError
	if _, err := c.CreateChatCompletion(ctx, ask); !errors.As(err, &wrong) || wrong.HTTPStatusCode != 400 || *wrong.Param != "temperature" {
		t.Errorf("%v", err)
	}
}
