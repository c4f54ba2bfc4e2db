package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"gorgonia.org/leanattention/decoder/serve"
)

// server is the flags of leanlm serve.
type server struct {
	model       modelFlags
	options     serve.Options
	host        string
	port        int
	keys        string
	cert, key   string
	connections int
	patience    time.Duration
	quiet       bool
	swapMB      int
	pins        []string // files
}

const serveAbout = `serve answers OpenAI's HTTP interface: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /health and /metrics. It listens on a
loopback address unless -host says another one. An interrupt refuses new requests and lets those that run end; a second interrupt, or -patience,
ends them.`

func (s *server) flags() *flags {
	f := newFlags("serve", serveAbout)
	s.model.add(f)
	o := &s.options
	f.text(&s.host, "host", "127.0.0.1", "`address` to listen on")
	f.integer(&s.port, "port", 8080, "`port` to listen on; 0: a free one")
	f.text(&o.Model, "a,alias", "", "`name` of the model in requests and answers; the name of the file or folder if it is not given")
	f.text(&s.keys, "api-key-file", "", "`file` of API keys, one a line, one of which each request must have, except for /health")
	f.text(&s.cert, "ssl-cert-file", "", "`file` with the certificate for HTTPS; with -ssl-key-file")
	f.text(&s.key, "ssl-key-file", "", "`file` with the private key for HTTPS")
	f.each("allow-host", "`name` that requests may address besides that of -host and loopback addresses; may be given several times; * is any", func(text string) error {
		o.Hosts = append(o.Hosts, text)
		return nil
	})
	f.each("allow-origin", "`origin` of web pages whose scripts may send requests, as https://example.org; may be given several times; * is any", func(text string) error {
		o.Origins = append(o.Origins, text)
		return nil
	})
	f.integer(&o.Queue, "queue", 64, "`texts` that may wait beside those of -np; more are refused with 429")
	f.integer(&o.Texts, "most-choices", 16, "most `prompts` of a request, and most choices of a prompt")
	f.integer(&s.connections, "connections", 512, "most `connections`; others wait")
	f.add("timeout", "most `time` of a request, as 90s", func(name, usage string) { f.DurationVar(&o.Time, name, 10*time.Minute, usage) })
	f.add("patience", "most `time` that running requests have after an interrupt", func(name, usage string) { f.DurationVar(&s.patience, name, 30*time.Second, usage) })
	f.number(&s.model.options.Gap, "gap", 3, "most `times` that prompts may make a step longer while other texts wait for their next tokens; 0: no bound")
	f.is(&s.model.options.BatchInvariant, "invariant", "a text depends on its request alone, to the last bit, whatever else runs")
	f.text(&s.model.options.Swap, "swap", "", "`folder` for the keys and values of texts that wait since the cache is full; otherwise these texts are computed again")
	f.integer(&s.swapMB, "swap-size", 4096, "most `megabytes` of these files")
	f.each("pin", "`file` with a system message whose keys and values stay in the cache; without a chat template, with the beginning of prompts; may be given several times", func(text string) error {
		s.pins = append(s.pins, text)
		return nil
	})
	f.is(&s.quiet, "quiet", "write no line for each request to standard error")
	f.is(&o.Prompts, "log-prompts", "lines have the bodies of requests, too")
	return f
}

func serveModel(ctx context.Context, args []string, std streams) (err error) {
	var s server
	if err := s.flags().parse(args, std); err != nil {
		return err
	}
	switch {
	case (s.cert == "") != (s.key == ""):
		return usagef("one of -ssl-cert-file and -ssl-key-file is missing")
	case s.port < 0 || s.port > 65535:
		return usagef("-port is %d, not in [0, 65535]", s.port)
	case s.options.Queue < 1:
		return usagef("-queue is %d, less than 1", s.options.Queue)
	case s.options.Texts < 1:
		return usagef("-most-choices is %d, less than 1", s.options.Texts)
	case s.connections < 1:
		return usagef("-connections is %d, less than 1", s.connections)
	case s.options.Time <= 0:
		return usagef("-timeout is %v, not above 0", s.options.Time)
	case s.patience < 0:
		return usagef("-patience is %v, less than 0", s.patience)
	case s.swapMB < 1 || s.swapMB > 1<<30:
		return usagef("-swap-size is %d, not in [1, %d]", s.swapMB, 1<<30)
	case s.model.options.BatchInvariant && s.model.device != "cpu":
		return usagef("-invariant with -device %s: linear layers on GPUs depend on the number of rows", s.model.device)
	case s.quiet && s.options.Prompts:
		return usagef("-log-prompts with -quiet: there are no lines")
	}
	if s.options.Keys, err = readKeys(s.keys); err != nil {
		return err
	}
	if s.model.options.Swap != "" {
		s.model.options.SwapBytes = int64(s.swapMB) << 20
	}
	pins := make([]string, len(s.pins))
	for i, name := range s.pins {
		if pins[i], err = readText(name, std.in); err != nil {
			return fmt.Errorf("-pin: %w", err)
		}
	}
	model, err := s.model.open()
	if err != nil {
		return err
	}
	defer func() { err = model.end(err) }()
	if n := model.world.Size; n > 1 {
		return usagef("WORLD_SIZE is %d, and a server has one process: leanlm generate has ranks", n)
	}
	if s.options.Model == "" {
		if s.options.Model = "tiny"; s.model.path != "" {
			s.options.Model = filepath.Base(filepath.Clean(s.model.path))
		}
	}
	if s.host != "" {
		s.options.Hosts = append(s.options.Hosts, s.host)
	}
	if !s.quiet {
		s.options.Log = slog.New(slog.NewTextHandler(std.err, nil))
	}
	listener, err := s.listen()
	if err != nil {
		return err
	}
	defer listener.Close() // closed already, unless the engine fails
	engine, err := s.model.engine(model, std)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	handler, err := serve.New(model.Model, engine, s.options)
	if err != nil {
		return err
	}
	for i, text := range pins {
		if err := handler.Pin(ctx, text); err != nil {
			return fmt.Errorf("-pin %s (-cache-tokens makes the cache larger): %w", s.pins[i], err)
		}
	}
	scheme := "http"
	if s.cert != "" {
		scheme = "https"
	}
	fmt.Fprintf(std.err, "serving %s at %s://%v\n", printable(s.options.Model), scheme, listener.Addr())
	return s.serve(ctx, listener, handler)
}

// listen listens on the address, with TLS if there is a certificate.
func (s *server) listen() (net.Listener, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(s.host, strconv.Itoa(s.port)))
	if err != nil {
		return nil, err
	}
	l = &limited{Listener: l, free: make(chan struct{}, s.connections), closed: make(chan struct{})}
	if s.cert == "" {
		return l, nil
	}
	pair, err := tls.LoadX509KeyPair(s.cert, s.key)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}), nil
}

// serve answers requests until an interrupt.
func (s *server) serve(ctx context.Context, l net.Listener, handler *serve.Server) error {
	ctx, unhook := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer unhook()
	h := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 1 << 16}
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(l) }()
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
		unhook() // another interrupt ends the process
	}
	patience, cancel := context.WithTimeout(context.Background(), s.patience)
	defer cancel()
	if e := handler.Shutdown(patience); e != nil {
		err = errors.Join(err, fmt.Errorf("requests were ended after %v: %w", s.patience, e))
	}
	// The handlers have ended, or are about to write the end of their answers.
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if e := h.Shutdown(last); e != nil {
		err = errors.Join(err, h.Close())
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// readKeys reads the file of API keys.
func readKeys(name string) (keys []string, err error) {
	if name == "" {
		return nil, nil
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("-api-key-file: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" {
			keys = append(keys, line)
		}
	}
	if keys == nil {
		return nil, fmt.Errorf("-api-key-file: %s has no key", name)
	}
	return keys, nil
}

// limited is a listener with a bound of connections. Accept waits until another connection is closed.
type limited struct {
	net.Listener
	free   chan struct{} // has an element for each connection
	closed chan struct{}
	once   sync.Once
}

func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.free <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &connection{Conn: c, leave: func() { <-l.free }}, nil
}

func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type connection struct {
	net.Conn
	once  sync.Once
	leave func()
}

func (c *connection) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.leave)
	return err
}
