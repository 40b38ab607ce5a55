"""All decisions of the server: `Service.handle(event, now_ns) -> effects`. No socket, clock, thread, file or GPU in
here."""
