package serve

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// Options configures a [Server]. The zero value is valid.
type Options struct {
	// Model is the name of the model. "": "default".
	Model string

	// Keys are the API keys, one of which each request must have, except for /health. nil: requests need no key.
	Keys []string

	// Hosts are names and addresses that requests may address besides loopback addresses. "*": any.
	Hosts []string

	// Origins are the origins of web pages whose scripts may send requests, such as "https://example.org". "*": any. nil: pages of
	// other servers are refused.
	Origins []string

	Queue  int           // texts that may wait beside those of a step; 0: 64
	Texts  int           // most prompts of a request, and most choices of a prompt; 0: 16
	Body   int64         // most bytes of a request; 0: 8 MiB
	Time   time.Duration // most time of a request; 0: 10 minutes
	Reader time.Duration // most time that a client takes to send a request, or to receive a part of the answer; 0: 30 seconds

	// Log receives a line for each request, at level debug for /health and /metrics; nil: none. Lines have no prompts, keys and answers, unless Prompts is set: then they have
	// the bodies of requests.
	Log     *slog.Logger
	Prompts bool
}

func (o *Options) fill() error {
	if o.Queue < 0 || o.Texts < 0 || o.Body < 0 || o.Time < 0 || o.Reader < 0 {
		return fmt.Errorf("serve: an option is negative: Queue %d, Texts %d, Body %d, Time %v, Reader %v: %w", o.Queue, o.Texts, o.Body, o.Time, o.Reader, decoder.ErrConfig)
	}
	if o.Prompts && o.Log == nil {
		return fmt.Errorf("serve: Prompts is set without Log: %w", decoder.ErrConfig)
	}
	if slices.Contains(o.Keys, "") {
		return fmt.Errorf("serve: a key is empty: %w", decoder.ErrConfig)
	}
	if o.Model == "" {
		o.Model = "default"
	}
	set(&o.Queue, 64)
	set(&o.Texts, 16)
	set(&o.Body, 8<<20)
	set(&o.Time, 10*time.Minute)
	set(&o.Reader, 30*time.Second)
	return nil
}

// set sets x to the default, if x is zero.
func set[T comparable](x *T, otherwise T) {
	if *x == *new(T) {
		*x = otherwise
	}
}

// Server is an http.Handler for the paths of the package.
type Server struct {
	options    Options
	model      *decoder.Model
	engine     *decoder.Engine
	templates  *chat.Templates // nil: none
	ends       []int           // tokens that end an answer
	takesTools bool            // the template has a place for tools
	special    []string        // names of special tokens
	formats    formats
	vocab      int
	began      time.Time
	keys       [][sha256.Size]byte
	metrics    *metrics

	stopping context.Context // done when requests must end
	stop     context.CancelFunc

	mu     sync.Mutex
	closed bool          // no new requests
	texts  int           // of all requests
	idle   chan struct{} // closed when closed is set and texts is 0
}

// New returns a server for an engine of a model. The model and the engine must stay open until [Server.Shutdown] returns. Engines
// with ranks are ErrConfig.
func New(m *decoder.Model, e *decoder.Engine, o Options) (*Server, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	t := m.Tokenizer()
	switch {
	case t == nil:
		return nil, fmt.Errorf("serve: the model has no tokenizer: %w", decoder.ErrMissing)
	case e.Options().Ranks != nil:
		return nil, fmt.Errorf("serve: an engine with ranks takes requests from one goroutine: %w", decoder.ErrConfig)
	}
	s := &Server{options: o, model: m, engine: e, vocab: t.VocabSize(), began: time.Now(), metrics: newMetrics(), idle: make(chan struct{})}
	templates, err := m.Templates()
	switch {
	case err == nil:
		s.templates = templates
		if s.ends, err = m.ChatEnds(templates); err != nil {
			return nil, err
		}
		s.takesTools = rendersTools(templates)
	case !errors.Is(err, chat.ErrNoTemplate):
		return nil, err
	}
	for id := range s.vocab {
		if name, ok := t.Special(id); ok && utf8.RuneCountInString(name) > 1 {
			s.special = append(s.special, name)
		}
	}
	for _, key := range o.Keys {
		s.keys = append(s.keys, sha256.Sum256([]byte(key)))
	}
	s.formats = s.newFormats()
	s.stopping, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// rendersTools reports whether tools change the text of a conversation.
func rendersTools(t *chat.Templates) bool {
	c := chat.Conversation{Messages: []chat.Message{{Role: "user", Content: "Hello"}}}
	without, err := t.Render(c)
	if err != nil {
		return false
	}
	c.Tools = []json.RawMessage{json.RawMessage(`{"type": "function", "function": {"name": "f", "description": "does something", "parameters": {"type": "object", "properties": {}}}}`)}
	with, err := t.Render(c)
	return err == nil && with != without
}

// Shutdown refuses new requests, and waits for the requests that run. When ctx is done, Shutdown ends these requests with an error of
// status 503, and returns the cause. Shutdown does not close the engine.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		if s.texts == 0 {
			close(s.idle)
		}
	}
	s.mu.Unlock()
	select {
	case <-s.idle:
		s.stop()
		return nil
	case <-ctx.Done():
	}
	s.stop()
	<-s.idle
	return context.Cause(ctx)
}

// enter counts n more texts, or returns an error if the queue is full. The caller calls leave when the texts have ended.
func (s *Server) enter(n int) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	most := s.engine.Options().Batch + s.options.Queue
	switch {
	case s.closed:
		return nil, errStopping
	case n > most:
		return nil, &apiError{status: http.StatusBadRequest, message: fmt.Sprintf("the request has %d texts, and the server takes %d at a time", n, most)}
	case s.texts+n > most:
		return nil, &apiError{status: http.StatusTooManyRequests, code: "rate_limit_exceeded", message: fmt.Sprintf("the queue is full: %d texts run or wait, and the server takes %d", s.texts, most)}
	}
	s.texts += n
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.texts -= n; s.texts == 0 && s.closed {
			close(s.idle)
		}
	}, nil
}

// running returns the number of texts that run or wait.
func (s *Server) running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.texts
}

// route is a path of the server.
type route struct {
	method string
	answer func(s *Server, w http.ResponseWriter, r *http.Request, body []byte) error
}

var routes = map[string]route{
	"/v1/completions":      {http.MethodPost, (*Server).complete},
	"/v1/chat/completions": {http.MethodPost, (*Server).chat},
	"/v1/models":           {http.MethodGet, (*Server).list},
	"/tokenize":            {http.MethodPost, (*Server).tokenize},
	"/health":              {http.MethodGet, (*Server).health},
	"/metrics":             {http.MethodGet, (*Server).writeMetrics},
	"/":                    {http.MethodGet, file("text/html", pageHTML)},
	"/page.css":            {http.MethodGet, file("text/css", pageCSS)},
	"/page.js":             {http.MethodGet, file("text/javascript", pageJS)},
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	out := &answer{ResponseWriter: w}
	path, body, err := s.answer(out, r)
	var begun begunError
	if err != nil && !errors.As(err, &begun) && out.status == 0 {
		e := asAPIError(err)
		h := out.Header()
		h.Set("Content-Type", "application/json")
		switch e.status {
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			h.Set("Retry-After", "1")
		case http.StatusUnauthorized:
			h.Set("WWW-Authenticate", "Bearer")
			if path == "/" { // a browser asks for the key as a password
				h.Set("WWW-Authenticate", `Basic realm="leanlm: the password is an API key", charset="UTF-8"`)
			}
		}
		out.WriteHeader(e.status)
		_, _ = out.Write(e.body()) // the connection is gone after an error
	}
	took := time.Since(began)
	s.metrics.request(path, out.status, took)
	if s.options.Log == nil {
		return
	}
	fields := []any{"method", r.Method, "path", path, "status", out.status, "bytes", out.bytes, "seconds", took.Seconds(), "client", r.RemoteAddr}
	if s.options.Prompts {
		fields = append(fields, "body", string(body))
	}
	if err != nil {
		fields = append(fields, "error", err.Error())
	}
	level := slog.LevelInfo
	if path == "/health" || path == "/metrics" { // asked for all the time
		level = slog.LevelDebug
	}
	s.options.Log.Log(r.Context(), level, "request", fields...)
}

// answer counts what is written.
type answer struct {
	http.ResponseWriter
	status, bytes int
}

func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (a *answer) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

func (a *answer) Write(b []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	n, err := a.ResponseWriter.Write(b)
	a.bytes += n
	return n, err
}

// asAPIError returns what a client is told of an error.
func asAPIError(err error) *apiError {
	var e *apiError
	if errors.As(err, &e) {
		return e
	}
	return &apiError{status: http.StatusInternalServerError, message: err.Error()}
}

// answer answers a request. path is that of the route, for metrics and logs.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) (path string, body []byte, err error) {
	path = r.URL.Path
	if path != "/" {
		path = strings.TrimSuffix(path, "/")
	}
	to, ok := routes[path]
	if name, model := strings.CutPrefix(path, "/v1/models/"); model {
		path, ok = "/v1/models/", true
		to = route{http.MethodGet, func(s *Server, w http.ResponseWriter, _ *http.Request, _ []byte) error { return s.show(w, name) }}
	}
	if !ok {
		path = "other"
	}
	if err := s.admit(w, r, path); err != nil {
		return path, nil, err
	}
	switch {
	case !ok:
		return path, nil, &apiError{status: http.StatusNotFound, message: fmt.Sprintf("there is no path %s", short(r.URL.Path))}
	case r.Method == http.MethodOptions:
		w.WriteHeader(http.StatusNoContent)
		return path, nil, nil
	case r.Method != to.method && (r.Method != http.MethodHead || to.method != http.MethodGet):
		w.Header().Set("Allow", to.method)
		return path, nil, &apiError{status: http.StatusMethodNotAllowed, message: fmt.Sprintf("method %s for %s, want %s", short(r.Method), path, to.method)}
	}
	if to.method == http.MethodPost {
		if body, err = s.read(w, r); err != nil {
			return path, nil, err
		}
	}
	return path, body, to.answer(s, w, r, body)
}

// read reads the body of a request.
func (s *Server) read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return nil, &apiError{status: http.StatusUnsupportedMediaType, message: "the Content-Type is not application/json"}
	}
	c := http.NewResponseController(w)
	if err := c.SetReadDeadline(time.Now().Add(s.options.Reader)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, err
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.options.Body))
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &long):
		return nil, &apiError{status: http.StatusRequestEntityTooLarge, message: fmt.Sprintf("the body has more than %d bytes", long.Limit)}
	case err != nil:
		return nil, &apiError{status: http.StatusBadRequest, message: fmt.Sprintf("the body cannot be read: %v", err)}
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, err
	}
	return body, nil
}

// admit checks where a request comes from, and the key.
func (s *Server) admit(w http.ResponseWriter, r *http.Request, path string) error {
	if !s.isHost(r.Host) {
		return &apiError{status: http.StatusForbidden, message: fmt.Sprintf("the request addresses %q, which Options.Hosts does not have (-allow-host of leanlm serve)", short(r.Host))}
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		w.Header().Set("Vary", "Origin")
		switch {
		case slices.Contains(s.options.Origins, "*"), slices.Contains(s.options.Origins, origin):
			h := w.Header()
			h.Set("Access-Control-Allow-Origin", origin)
			h.Set("Access-Control-Allow-Methods", "GET, POST")
			h.Set("Access-Control-Allow-Headers", "Authorization, Content-Type")
			h.Set("Access-Control-Max-Age", "600")
		case !sameOrigin(origin, r.Host):
			return &apiError{status: http.StatusForbidden, message: fmt.Sprintf("the request is of a page of %q, which Options.Origins does not have (-allow-origin of leanlm serve)", short(origin))}
		}
	}
	if path == "/health" || r.Method == http.MethodOptions || s.keys == nil {
		return nil
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	_, password, basic := r.BasicAuth()
	if basic {
		key = password
	}
	sum, found := sha256.Sum256([]byte(strings.TrimSpace(key))), 0
	for i := range s.keys {
		found |= subtle.ConstantTimeCompare(sum[:], s.keys[i][:])
	}
	if !basic && !strings.EqualFold(scheme, "Bearer") || found == 0 {
		return &apiError{status: http.StatusUnauthorized, code: "invalid_api_key", message: "no valid API key: the header Authorization is to be Bearer and a key, or Basic with a key as the password"}
	}
	return nil
}

// isHost reports whether a request may address a host.
func (s *Server) isHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() || strings.EqualFold(host, "localhost") {
		return true
	}
	return slices.ContainsFunc(s.options.Hosts, func(h string) bool { return h == "*" || strings.EqualFold(h, host) })
}

func sameOrigin(origin, host string) bool {
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, host)
}

// modelInfo is an element of /v1/models.
type modelInfo struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func (s *Server) info() modelInfo {
	return modelInfo{s.options.Model, "model", s.began.Unix(), "leanattention"}
}

func (s *Server) list(w http.ResponseWriter, _ *http.Request, _ []byte) error {
	return writeJSON(w, map[string]any{"object": "list", "data": []modelInfo{s.info()}})
}

func (s *Server) show(w http.ResponseWriter, name string) error {
	raw, err := json.Marshal(name)
	if err != nil {
		return err
	}
	if err := s.isModel(raw); err != nil {
		return err
	}
	return writeJSON(w, s.info())
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request, _ []byte) error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return errStopping
	}
	return writeJSON(w, map[string]string{"status": "ok"})
}

// tokenize answers with the tokens of a prompt, or of a conversation with the beginning of an answer.
func (s *Server) tokenize(w http.ResponseWriter, _ *http.Request, body []byte) (err error) {
	var prompt string
	var messages []chat.Message
	var tools tools
	given := false
	err = members{
		"model": s.isModel,
		"prompt": func(raw json.RawMessage) error {
			given = true
			return into(&prompt)(raw)
		},
		"messages": func(raw json.RawMessage) error {
			messages, err = readMessages(raw)
			return err
		},
		"tools": func(raw json.RawMessage) error {
			tools, err = s.readTools(raw)
			return err
		},
	}.read(body, "")
	switch {
	case err != nil:
		return err
	case given == (messages != nil):
		return wrong("prompt", "want one of prompt and messages")
	case tools.list != nil && messages == nil:
		return wrong("tools", "messages is missing")
	case messages != nil && s.templates == nil:
		return wrong("messages", "the model has no chat template")
	}
	var ids []int
	if messages != nil {
		ids, err = s.conversation(messages, tools.list)
	} else {
		ids, err = s.encode("prompt", prompt, tokenizer.Options{})
	}
	if err != nil {
		return err
	}
	return writeJSON(w, map[string]any{"count": len(ids), "max_model_len": s.engine.Options().Context, "tokens": ids})
}

func writeJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	if _, err := w.Write(b); err != nil {
		return begunError{err}
	}
	return nil
}
