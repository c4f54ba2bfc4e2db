// Package load measures servers with OpenAI's HTTP interface under load.
package load

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Commands lists the commands of this package.
var Commands = []command.Command{{Name: "load", Summary: "servers with OpenAI's HTTP interface, such as leanlm serve and llama-server, under the load of several clients", Setup: setup}}

// Metrics of a server. Times are of all requests of a round, and the figures are medians of the rounds.
const (
	firstMillis measure.Metric = "ms to the first token" // median
	gapMillis   measure.Metric = "ms between tokens"     // median
	worstMillis measure.Metric = "p99 ms between tokens"
)

// load is the load of one measurement.
type load struct {
	clients  int
	requests int // of each client
	words    int // of a prompt
	tokens   int // of a continuation
	bias     map[string]int
}

// server is a server under load.
type server struct{ name, url, key, model string }

func setup(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	var servers []server
	flags.Func("at", "`NAME=URL` of a server, such as lean=http://127.0.0.1:8080/v1; may be given several times", func(s string) error {
		name, url, ok := strings.Cut(s, "=")
		if !ok || name == "" || url == "" {
			return errors.New("not NAME=URL")
		}
		servers = append(servers, server{name: name, url: url})
		return nil
	})
	model := flags.String("model", "default", "`name` of the model in requests")
	key := flags.String("key", "", "API `key`")
	clients := flags.String("clients", "1,8,32", "`numbers` of clients")
	rounds := flags.Int("rounds", 3, "`rounds`, each of which loads all servers in turn")
	never := flags.Int("never", -1, "`token` that continuations do not have, such as the end of a text; -1: none")
	json := flags.String("json", "", "`file` for the figures")
	var l load
	flags.IntVar(&l.requests, "requests", 4, "`requests` of each client in a round, one after another")
	flags.IntVar(&l.words, "words", 64, "`words` of a prompt")
	flags.IntVar(&l.tokens, "tokens", 128, "most `tokens` of a continuation")
	return func(stdout, stderr io.Writer) error {
		if len(servers) == 0 {
			return errors.New("-at is needed")
		}
		counts, err := measure.Counts("-clients", *clients)
		if err != nil {
			return err
		}
		if *rounds < 1 || l.requests < 1 || l.words < 1 || l.tokens < 2 {
			return fmt.Errorf("-rounds %d, -requests %d, -words %d or -tokens %d is too small", *rounds, l.requests, l.words, l.tokens)
		}
		if *never >= 0 {
			l.bias = map[string]int{strconv.Itoa(*never): -100}
		}
		for i := range servers {
			servers[i].key, servers[i].model = *key, *model
		}
		m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
		if err != nil {
			return err
		}
		r := &measure.Report{Command: "load", Machine: m, Figures: []measure.Figure{}}
		for _, n := range counts {
			l.clients = n
			if err := l.measure(r, servers, *rounds, stdout); err != nil {
				return err
			}
			if err := r.Save(*json); err != nil {
				return err
			}
		}
		return nil
	}
}

// measure loads the servers in turn.
func (l load) measure(r *measure.Report, servers []server, rounds int, stdout io.Writer) error {
	name := fmt.Sprintf("%d clients, %d words, %d tokens", l.clients, l.words, l.tokens)
	all := make([]map[measure.Metric][]float64, len(servers))
	for round := range rounds {
		for i, s := range servers {
			result, err := l.run(s, uint64(round))
			if err != nil {
				return fmt.Errorf("%s at %s: %w", s.name, s.url, err)
			}
			if all[i] == nil {
				all[i] = map[measure.Metric][]float64{}
			}
			for m, x := range result.figures() {
				all[i][m] = append(all[i][m], x)
			}
		}
	}
	for i, s := range servers {
		for _, m := range []measure.Metric{measure.Tokens, firstMillis, gapMillis, worstMillis} {
			x := measure.Median(all[i][m])
			r.Figures = append(r.Figures, measure.Figure{Table: "Servers under load", Case: name, Contender: s.name, Metric: m, Value: x})
			fmt.Fprintf(stdout, "%-40s %-12s %10s %s\n", name, s.name, m.Format(x), m)
		}
	}
	return nil
}

// result is the times of a round.
type result struct {
	mu     sync.Mutex
	tokens int
	took   time.Duration
	first  []float64 // ms
	gaps   []float64 // ms
}

func (r *result) figures() map[measure.Metric]float64 {
	slices.Sort(r.gaps)
	return map[measure.Metric]float64{
		measure.Tokens: float64(r.tokens) / r.took.Seconds(), firstMillis: measure.Median(r.first), gapMillis: measure.Median(r.gaps), worstMillis: r.gaps[(len(r.gaps)-1)*99/100],
	}
}

// run loads a server. Prompts differ, so that no request finds the beginning of another one in a cache.
func (l load) run(s server, seed uint64) (*result, error) {
	config := openai.DefaultConfig(s.key)
	config.BaseURL = s.url
	client := openai.NewClientWithConfig(config)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	r := &result{}
	var clients sync.WaitGroup
	began := time.Now()
	for i := range l.clients {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for range l.requests {
				if err := l.request(ctx, client, s.model, prompt(rng, l.words), r); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	clients.Wait()
	r.took = time.Since(began)
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if len(r.gaps) == 0 {
		return nil, errors.New("no answer has two pieces")
	}
	return r, nil
}

// request streams a continuation.
func (l load) request(ctx context.Context, client *openai.Client, model, prompt string, r *result) error {
	last := time.Now()
	stream, err := client.CreateCompletionStream(ctx, openai.CompletionRequest{
		Model: model, Prompt: prompt, MaxTokens: l.tokens, Temperature: 1, Stream: true, StreamOptions: &openai.StreamOptions{IncludeUsage: true}, LogitBias: l.bias,
	})
	if err != nil {
		return err
	}
	defer stream.Close()
	var first float64
	var gaps []float64
	tokens := 0
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if e.Usage != nil && e.Usage.CompletionTokens > 0 {
			tokens = e.Usage.CompletionTokens
		}
		if len(e.Choices) == 0 || e.Choices[0].Text == "" {
			continue
		}
		now := time.Now()
		if ms := now.Sub(last).Seconds() * 1e3; first == 0 {
			first = ms
		} else {
			gaps = append(gaps, ms)
		}
		last = now
	}
	if tokens == 0 {
		return errors.New("the stream has no usage")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens += tokens
	r.first = append(r.first, first)
	r.gaps = append(r.gaps, gaps...)
	return nil
}

// prompt returns random words.
func prompt(rng *rand.Rand, words int) string {
	list := strings.Fields("the a king girl hill river day night snow ship old small went came saw found said asked and but then who with in on under over never always")
	var b strings.Builder
	for i := range words {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(list[rng.IntN(len(list))])
	}
	return b.String()
}
