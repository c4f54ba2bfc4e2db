package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/jsonschema"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

const (
	mostStops    = 16
	mostStop     = 1024 // bytes of a text of stop
	mostLogProbs = 20
)

// common are the fields of both kinds of requests.
type common struct {
	request  decoder.Request
	n, best  int // choices of a prompt, and those that are computed
	logprobs int // most likely tokens beside each token; -1: no probabilities
	stream   bool
	usage    bool // a stream ends with the usage
	seeded   bool
	seconds  float64            // most time; 0: that of the server
	schema   *jsonschema.Schema // of answers; nil: none
}

func (s *Server) newCommon() *common {
	c := &common{n: 1, logprobs: -1}
	c.request.Sampling = s.model.Sampling()
	if c.request.Sampling.Temperature == 0 {
		c.request.Sampling.Temperature = 1
	}
	return c
}

// fields are the fields of a request, which may be changed.
func (c *common) fields(s *Server) members {
	how := &c.request.Sampling
	return members{
		"model":       s.isModel,
		"n":           within(&c.n, 1, s.options.Texts),
		"max_tokens":  within(&c.request.Tokens, 1, 1<<31-1),
		"temperature": within(&how.Temperature, 0, 2),
		"top_p": func(raw json.RawMessage) error {
			err := within(&how.TopP, 0, 1)(raw)
			if how.TopP == 0 {
				how.TopP = math.SmallestNonzeroFloat64 // the most likely token alone; 0 of Sampling keeps all
			}
			return err
		},
		"presence_penalty":  within(&how.PresencePenalty, -2, 2),
		"frequency_penalty": within(&how.FrequencyPenalty, -2, 2),
		"logit_bias":        func(raw json.RawMessage) error { return readBias(raw, how, s.vocab) },
		"seed": func(raw json.RawMessage) error {
			c.seeded = true
			var seed int64
			err := into(&seed)(raw)
			how.Seed = uint64(seed)
			return err
		},
		"stop":   func(raw json.RawMessage) error { return readStops(raw, &c.request.Stop) },
		"stream": into(&c.stream),
		"stream_options": func(raw json.RawMessage) error {
			return members{"include_usage": into(&c.usage), "include_obfuscation": ignored[bool]()}.read(raw, "stream_options")
		},
		"user":     ignored[string](),
		"priority": within(&c.request.Priority, -1<<31, 1<<31-1),
		"timeout":  within(&c.seconds, 0.001, s.options.Time.Seconds()),
	}
}

// isModel checks the name of the model.
func (s *Server) isModel(raw json.RawMessage) error {
	var name string
	if err := into(&name)(raw); err != nil {
		return err
	}
	if name != s.options.Model {
		return &apiError{status: http.StatusNotFound, param: "model", code: "model_not_found", message: fmt.Sprintf("model: there is no %q; the server has %q", short(name), s.options.Model)}
	}
	return nil
}

// finish checks the fields against each other, and returns the requests of prompts.
func (c *common) finish(prompts [][]int) (all []decoder.Request, err error) {
	if c.usage && !c.stream {
		return nil, wrong("stream_options", "the request is no stream")
	}
	if c.best == 0 {
		c.best = c.n
	}
	if c.logprobs >= 0 || c.best > c.n {
		c.request.LogProbs = max(1, c.logprobs)
	}
	if !c.seeded {
		c.request.Sampling.Seed = rand.Uint64()
	}
	for _, p := range prompts {
		for i := range c.best {
			r := c.request
			r.Prompt = p
			r.Sampling.Seed += uint64(i) // choices of a prompt differ
			if c.schema != nil {
				r.Constraint = c.schema.Constrain()
			}
			all = append(all, r)
		}
	}
	return all, nil
}

func readBias(raw json.RawMessage, how *decoder.Sampling, vocab int) error {
	var given map[string]float64
	if err := json.Unmarshal(raw, &given); err != nil {
		return fmt.Errorf("%s is no object from tokens to numbers", short(raw))
	}
	how.LogitBias = maps.Clone(how.LogitBias)
	for name, x := range given {
		id, err := strconv.Atoi(name)
		if err != nil || id < 0 || id >= vocab {
			return fmt.Errorf("%q is no token: tokens are numbers from 0 to %d", short(name), vocab-1)
		}
		if !(x >= -100 && x <= 100) {
			return fmt.Errorf("%v of token %d is not in [-100, 100]", x, id)
		}
		if how.LogitBias == nil {
			how.LogitBias = map[int]float64{}
		}
		how.LogitBias[id] += x
	}
	return nil
}

func readStops(raw json.RawMessage, to *[]string) error {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		*to = []string{one}
	} else if err := into(to)(raw); err != nil {
		return fmt.Errorf("%s is no text and no list of texts", short(raw))
	}
	if len(*to) > mostStops {
		return fmt.Errorf("%d texts, more than %d", len(*to), mostStops)
	}
	for _, s := range *to {
		switch {
		case s == "":
			return errors.New("a text is empty")
		case len(s) > mostStop:
			return fmt.Errorf("a text of %d bytes, more than %d", len(s), mostStop)
		}
	}
	return nil
}

// readPrompts reads a text, tokens, or a list of texts or of tokens.
func (s *Server) readPrompts(raw json.RawMessage) (prompts [][]int, err error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return s.encodeAll([]string{text})
	}
	var texts []string
	if json.Unmarshal(raw, &texts) == nil && len(texts) > 0 {
		return s.encodeAll(texts)
	}
	var ids []int
	if json.Unmarshal(raw, &ids) == nil && len(ids) > 0 {
		prompts = [][]int{ids}
	} else if json.Unmarshal(raw, &prompts) != nil || len(prompts) == 0 {
		return nil, wrong("prompt", "%s is no text, no tokens, and no list of these that is not empty", short(raw))
	}
	if len(prompts) > s.options.Texts {
		return nil, wrong("prompt", "%d prompts, more than %d", len(prompts), s.options.Texts)
	}
	for i, p := range prompts {
		for _, id := range p {
			if id < 0 || id >= s.vocab {
				return nil, wrong("prompt", "prompt %d has token %d; tokens are 0 to %d", i+1, id, s.vocab-1)
			}
		}
	}
	return prompts, s.checkLengths("prompt", prompts)
}

func (s *Server) encodeAll(texts []string) (prompts [][]int, err error) {
	if len(texts) > s.options.Texts {
		return nil, wrong("prompt", "%d prompts, more than %d", len(texts), s.options.Texts)
	}
	for _, text := range texts {
		ids, err := s.encode("prompt", text, tokenizer.Options{})
		if err != nil {
			return nil, err
		}
		prompts = append(prompts, ids)
	}
	return prompts, s.checkLengths("prompt", prompts)
}

// encode returns the tokens of a text that fit the context.
func (s *Server) encode(param, text string, o tokenizer.Options) ([]int, error) {
	most := s.engine.Options().Context
	o.AtMost = most
	ids, err := s.model.Tokenizer().Encode(text, o)
	switch {
	case errors.Is(err, tokenizer.ErrTooLong):
		return nil, &apiError{status: http.StatusBadRequest, param: param, code: tooLong, message: fmt.Sprintf("%s: more than %d tokens, which the context has", param, most)}
	case err != nil:
		return nil, wrong(param, "%v", err)
	}
	return ids, nil
}

const tooLong = "context_length_exceeded"

func (s *Server) checkLengths(param string, prompts [][]int) error {
	most := s.engine.Options().Context
	for i, p := range prompts {
		switch {
		case len(p) == 0:
			return wrong(param, "prompt %d has no tokens", i+1)
		case len(p) > most:
			return &apiError{status: http.StatusBadRequest, param: param, code: tooLong, message: fmt.Sprintf("%s: prompt %d has %d tokens, and the context %d", param, i+1, len(p), most)}
		}
	}
	return nil
}
