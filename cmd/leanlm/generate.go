package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/jsonschema"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// generation is the flags of leanlm generate.
type generation struct {
	model    modelFlags
	sampling samplingFlags
	long     longFlags
	prompts  []string
	files    []textFile
	cache    string
	tokens   int
	samples  int
	stops    []string
	schema   string // file
	parse    bool   // names in prompts are special tokens
	special  bool   // texts have the names of special tokens
	draft    int
	logprobs int
	json     bool
	stats    bool
}

func (g *generation) flags() *flags {
	f := newFlags("generate", "generate continues texts, and writes the continuations. Several prompts are computed together.")
	g.model.add(f)
	g.sampling.add(f)
	g.long.add(f)
	f.each("p,prompt", "`text` to continue; may be given several times", func(s string) error {
		g.prompts = append(g.prompts, s)
		return nil
	})
	f.each("f,file", "`file` with a text to continue, without the end of its last line; - is standard input; may be given several times", func(s string) error {
		g.files = append(g.files, textFile{name: s})
		return nil
	})
	f.each("prompts", "`file` of texts to continue, one a line, except empty lines; - is standard input; may be given several times", func(s string) error {
		g.files = append(g.files, textFile{name: s, lines: true})
		return nil
	})
	f.text(&g.cache, "prompt-cache", "", "`file` that keeps the keys and values of the prompt: a later run whose prompt begins with the same 16 tokens or more, of the same model and with the same options, computes only the others; the file is made if there is none, and written if the prompt goes beyond it")
	f.integer(&g.tokens, "n,predict,n-predict,max-new-tokens", 128, "most `tokens` to add to a text")
	f.integer(&g.samples, "n-samples", 1, "`texts` of each prompt, which is read once")
	f.stops(&g.stops)
	f.text(&g.schema, "json-schema", "", "`file` with a JSON schema of the continuations; - is standard input. The prompt does not tell the model of the schema")
	f.is(&g.parse, "parse-special", "names of special tokens in prompts, such as </s>, are these tokens")
	f.is(&g.special, "sp,special", showSpecial)
	f.integer(&g.draft, "draft,draft-n", 0, "most `tokens` to guess from what a text repeats, and to check in one step; 0: none")
	f.integer(&g.logprobs, "logprobs", 0, "with -json, the `number` of most likely tokens to tell with each token; 0: none")
	f.is(&g.json, "json", "write one JSON document at the end")
	f.is(&g.stats, "stats", "write what was computed to standard error")
	return f
}

// textFile is the file of -f or -prompts.
type textFile struct {
	name  string
	lines bool // each line is a text
}

// read returns the texts of the file.
func (f textFile) read(in io.Reader) (texts []string, err error) {
	flag := "-f"
	if f.lines {
		flag = "-prompts"
	}
	text, err := readText(f.name, in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	end := func(line string) string { return strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r") }
	if !f.lines {
		return []string{end(text)}, nil
	}
	for line := range strings.Lines(text) {
		if line = end(line); line != "" {
			texts = append(texts, line)
		}
	}
	if texts == nil {
		return nil, fmt.Errorf("-prompts: no line of %s has a text", f.name)
	}
	return texts, nil
}

func generate(ctx context.Context, args []string, std streams) (err error) {
	var g generation
	f := g.flags()
	if err := f.parse(args, std); err != nil {
		return err
	}
	switch {
	case g.tokens < 1:
		return usagef("-n is %d, less than 1", g.tokens)
	case g.samples < 1:
		return usagef("-n-samples is %d, less than 1", g.samples)
	case g.logprobs > 0 && !g.json:
		return usagef("-logprobs is for -json")
	case g.schema != "" && g.stops != nil:
		return usagef("-stop with -json-schema: a text that ends early is no JSON")
	}
	if n := g.standardInputs(); n > 1 {
		return usagef("- is given %d times, and standard input can be read once", n)
	}
	for _, f := range g.files {
		texts, err := f.read(std.in)
		if err != nil {
			return err
		}
		g.prompts = append(g.prompts, texts...)
	}
	if len(g.prompts) == 0 {
		return usagef("no prompt: give a text with -p, a file with -f, or a file of several with -prompts")
	}
	if g.cache != "" && len(g.prompts) > 1 {
		return usagef("-prompt-cache is for one prompt, and there are %d", len(g.prompts))
	}
	schema := ""
	if g.schema != "" {
		if schema, err = readText(g.schema, std.in); err != nil {
			return fmt.Errorf("-json-schema: %w", err)
		}
	}
	model, err := g.model.open()
	if err != nil {
		return err
	}
	defer func() { err = model.end(err) }()
	if n := model.world.Size; n > 1 && g.cache != "" {
		return usagef("-prompt-cache with WORLD_SIZE %d: each rank has a part of the keys and values alone", n)
	}
	texts := map[string]string{}
	for i, prompt := range g.prompts {
		texts[fmt.Sprint("prompt ", i+1)] = prompt
	}
	texts["schema"] = schema
	interrupted := ctx
	if ctx, std, err = g.model.join(ctx, model, together{f, texts}, std); err != nil {
		return err
	}
	requests, err := g.requests(model, std)
	if err != nil {
		return err
	}
	if g.schema != "" {
		compiled, err := jsonschema.NewVocabulary(model.Tokenizer(), model.Ends(), requests[0].Sampling.Forbidden...).Compile([]byte(schema))
		if err != nil {
			return fmt.Errorf("-json-schema %s: %w", g.schema, err)
		}
		for i := range requests {
			requests[i].Constraint = compiled.Constrain()
		}
	}
	var cache *promptCache
	if g.cache != "" {
		if cache, err = openPromptCache(g.cache, "prompt", requests[0].Prompt); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, cache.Close()) }()
	}
	g.fit(requests)
	engine, err := g.model.engine(model, std)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	if err := cache.load(engine); err != nil {
		return err
	}
	err = errors.Join(g.run(ctx, engine, model, requests, std), interrupted.Err())
	if err == nil || errors.Is(err, context.Canceled) {
		if e := cache.save(interrupted, engine, std); e != nil {
			return e
		}
	}
	return err
}

// standardInputs returns how many files are standard input.
func (g *generation) standardInputs() (n int) {
	for _, f := range g.files {
		if f.name == "-" {
			n++
		}
	}
	if g.schema == "-" {
		n++
	}
	return n
}

// requests returns the requests of all texts.
func (g *generation) requests(model *opened, std streams) (all []decoder.Request, err error) {
	t := model.Tokenizer()
	if t == nil {
		return nil, fmt.Errorf("%s has no tokenizer", g.model.path)
	}
	how := g.sampling.of(model, std)
	seed := how.Seed
	for i, prompt := range g.prompts {
		ids, err := t.Encode(prompt, tokenizer.Options{Special: g.parse})
		if err != nil {
			return nil, fmt.Errorf("prompt %d: %w", i+1, err)
		}
		if len(ids) == 0 {
			return nil, fmt.Errorf("prompt %d has no tokens: nothing comes before what is to follow", i+1)
		}
		for range g.samples {
			how.Seed = seed + uint64(len(all)) // texts of one prompt and one seed are equal
			r := decoder.Request{Prompt: ids, Sampling: how, Tokens: g.tokens, Stop: g.stops, Draft: g.draft, LogProbs: g.logprobs, Special: g.special}
			g.long.set(&r, model)
			all = append(all, r)
		}
	}
	return all, nil
}

// fit chooses a context, a batch and a cache for all texts, unless flags say them.
func (g *generation) fit(requests []decoder.Request) {
	o := &g.model.options
	const context = 4096 // the largest one without a flag
	sum, most := 0, 0
	for _, r := range requests {
		n := min(len(r.Prompt), context) + min(r.Tokens, context) + 64 // a page may be partly filled
		sum, most = min(sum, math.MaxInt32-n)+n, max(most, n)
	}
	if o.Batch == 0 {
		o.Batch = min(len(requests), 16)
	}
	if o.Tokens == 0 && o.Context == 0 {
		if o.Batch > 0 && o.Batch < math.MaxInt32/most {
			sum = min(sum, o.Batch*most) // other texts wait
		}
		o.Tokens = max(sum, context)
	}
	o.Draft = g.draft * o.Batch
}

func (g *generation) run(ctx context.Context, engine *decoder.Engine, model *opened, requests []decoder.Request, std streams) error {
	began := time.Now()
	var first time.Duration
	texts, err := engine.StartAll(ctx, requests...)
	if err != nil {
		return err
	}
	document := document{Model: g.model.path, Device: "cpu"}
	if model.gpu != nil {
		document.Device = model.gpu.String()
	}
	for i, text := range texts {
		if !g.json && len(texts) > 1 {
			if err := write(std, separator(i), g.prompts[i/g.samples]); err != nil {
				return err
			}
		}
		result := textJSON{Prompt: g.prompts[i/g.samples], PromptTokens: requests[i].Prompt, Tokens: []int{}}
		var all strings.Builder
		for token, err := range text.Tokens() {
			if err != nil {
				return g.model.hint(err)
			}
			if first == 0 {
				first = time.Since(began)
			}
			if all.WriteString(token.Text); !g.json {
				if err := write(std, token.Text); err != nil {
					return err
				}
			}
			if token.ID >= 0 {
				result.Tokens = append(result.Tokens, token.ID)
				if g.logprobs > 0 {
					result.LogProbs = append(result.LogProbs, newLikely(model, token, g.special))
				}
			}
		}
		if !g.json {
			if err := write(std, "\n"); err != nil {
				return err
			}
		}
		result.Text, result.Reason, result.Shared, result.Dropped = all.String(), string(text.Reason()), text.Shared(), text.Dropped()
		if result.Dropped > 0 {
			fmt.Fprintf(std.err, "text %d was longer than the context of %d tokens: %d tokens were dropped\n", i+1, engine.Options().Context, result.Dropped)
		}
		document.Texts = append(document.Texts, result)
	}
	if g.stats {
		tellStats(std, engine.Stats(), requests, first, time.Since(began))
	}
	if g.json {
		document.Stats = newStats(engine.Stats(), &requests[0].Sampling, g.model.loading, first, time.Since(began))
		data, err := json.MarshalIndent(document, "", "  ")
		if err != nil {
			return err
		}
		if err := write(std, string(data), "\n"); err != nil {
			return err
		}
	}
	return nil
}

// separator is before the i-th text of several.
func separator(i int) string {
	if i == 0 {
		return ""
	}
	return "\n"
}

// write writes to standard output.
func write(std streams, pieces ...string) error {
	for _, piece := range pieces {
		if _, err := fmt.Fprint(std.out, piece); err != nil {
			return err
		}
	}
	return nil
}

// document is what -json writes.
type document struct {
	Model  string     `json:"model"`  // -m; "" is the shipped model
	Device string     `json:"device"` // cpu, or the GPUs
	Texts  []textJSON `json:"texts"`
	Stats  statsJSON  `json:"stats"`
}

// statsJSON is the work of all texts. Times are in seconds.
type statsJSON struct {
	Seed      *uint64 `json:"seed,omitempty"` // of the first text, if tokens are drawn
	Load      float64 `json:"load"`           // until the engine is made
	First     float64 `json:"first"`          // after Load, until the first token
	All       float64 `json:"all"`            // after Load
	Steps     int     `json:"steps"`
	Rows      int     `json:"rows"` // tokens that were computed
	MostTexts int     `json:"most_texts"`
	Shared    int     `json:"shared_tokens"`
	Preempted int     `json:"preempted"`
	Shifted   int     `json:"shifted"`
	Guessed   int     `json:"guessed"`
	Accepted  int     `json:"accepted"`
}

func newStats(s decoder.Stats, how *decoder.Sampling, load, first, all time.Duration) statsJSON {
	j := statsJSON{
		Load: load.Seconds(), First: first.Seconds(), All: all.Seconds(), Steps: s.Steps, Rows: s.Rows, MostTexts: s.MostTexts,
		Shared: s.SharedTokens, Preempted: s.Preempted, Shifted: s.Shifted, Guessed: s.Guessed, Accepted: s.Accepted,
	}
	if how.Temperature > 0 {
		j.Seed = &how.Seed
	}
	return j
}

type textJSON struct {
	Prompt       string       `json:"prompt"`
	PromptTokens []int        `json:"prompt_tokens"`
	Shared       int          `json:"shared_tokens"`            // tokens of the prompt that were read for another text
	Dropped      int          `json:"dropped_tokens,omitempty"` // by -keep and -context-shift
	Text         string       `json:"text"`
	Tokens       []int        `json:"tokens"` // with the token that ended the text
	Reason       string       `json:"reason"` // end, stop, length, context or cancelled
	LogProbs     []likelyJSON `json:"logprobs,omitempty"`
}

type likelyJSON struct {
	Token   int          `json:"token"`
	Text    string       `json:"text"`
	LogProb float64      `json:"logprob"`
	Top     []likelyJSON `json:"top,omitempty"`
}

func newLikely(model *opened, t decoder.Token, special bool) likelyJSON {
	one := func(id int, p float64) likelyJSON {
		return likelyJSON{Token: id, Text: decodeToken(model, id, special), LogProb: p}
	}
	l := one(t.ID, t.LogProb)
	for _, x := range t.Likely {
		l.Top = append(l.Top, one(x.ID, x.LogProb))
	}
	return l
}

func tellStats(std streams, s decoder.Stats, requests []decoder.Request, first, all time.Duration) {
	prompts := 0
	for _, r := range requests {
		prompts += len(r.Prompt)
	}
	fmt.Fprintf(std.err, "prompts: %d tokens, of which %d were shared; first token after %.3f s\n", prompts, s.SharedTokens, first.Seconds())
	fmt.Fprintf(std.err, "%d steps of %d tokens in all, at most %d texts at a time, in %.3f s\n", s.Steps, s.Rows, s.MostTexts, all.Seconds())
	if s.Guessed > 0 {
		fmt.Fprintf(std.err, "guesses: %d of %d were right\n", s.Accepted, s.Guessed)
	}
	if s.Shifted > 0 {
		fmt.Fprintf(std.err, "full context: tokens were dropped %d times\n", s.Shifted)
	}
	if s.Preempted > 0 {
		fmt.Fprintf(std.err, "full cache: texts had to wait %d times; -cache-tokens makes the cache larger\n", s.Preempted)
	}
}
